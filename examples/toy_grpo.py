"""GRPO on a laptop in seconds: a toy policy, an engine in bfloat16, and the gap between the two.

    python examples/toy_grpo.py

The "language model" sees only the last token. It is rewarded for counting: each token should be the
one before it plus 1, modulo 16. One step is what every larger run does:

    sync weights to the engine ──▶ sample groups ──▶ score ──▶ advantages of each group
        ──▶ log-probs of the trainer before the update ──▶ two clipped updates

The last two columns are |log-prob by trainer - log-prob by engine| of the sampled tokens, before
the update. The engine computes in bfloat16, so its relative error is the same at every step; the
largest gap grows as the policy becomes certain and its logits grow.

The second table uses the formula as papers print it, in float32. It pays a group of equal rewards
up to 0.06 for nothing, because the mean of eight equal numbers is not always that number. Here that
moves only the largest gaps, late, when most groups are equal.

Shapes: P prompts · G samples per prompt · B = P * G rows · T sampled tokens · V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardloop.rl.advantages import grpo_advantages
from shardloop.rl.correction import correction_weights
from shardloop.rl.losses import ppo_clip_loss

VOCAB, WIDTH = 16, 32
PROMPTS, SAMPLES, TOKENS = 32, 8, 6
STEPS, PASSES, CLIP, LR = 40, 2, 0.2, 1e-2
SHOWN_STEPS = (1, 8, 16, 24, 32, 40)


@dataclass(frozen=True)
class Row:
    """What one step reports."""

    step: int
    reward: float
    gap_mean: float
    gap_max: float


class LastTokenPolicy(nn.Module):
    """Next-token logits from the last token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, token_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.embed(token_ids)))
        return logits


def logprobs(policy: nn.Module, sequences_BT1: Tensor) -> Tensor:
    """Log-prob of every token after the first, [B, T]."""
    all_BTV = policy(sequences_BT1[:, :-1]).float().log_softmax(-1)
    picked: Tensor = all_BTV.gather(-1, sequences_BT1[:, 1:, None]).squeeze(-1)
    return picked


@torch.no_grad()
def sample(engine: nn.Module, first_B: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences [B, 1 + T] that begin with `first_B`, and the log-probs [B, T] of their draws."""
    tokens, behave = [first_B], []
    for _ in range(TOKENS):
        logprobs_BV = engine(tokens[-1]).float().log_softmax(-1)
        next_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=generator)
        behave.append(logprobs_BV.gather(-1, next_B1).squeeze(-1))
        tokens.append(next_B1.squeeze(-1))
    return torch.stack(tokens, 1), torch.stack(behave, 1)


def counting_reward(sequences_BT1: Tensor) -> Tensor:
    """Share of positions that hold the previous token plus 1, modulo the vocabulary, [B]."""
    return (sequences_BT1[:, 1:] == (sequences_BT1[:, :-1] + 1) % VOCAB).float().mean(1)


def plain_advantages(rewards_PG: Tensor) -> Tensor:
    """The printed formula in float32; equal rewards give rounding error instead of 0."""
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return centred_PG / (rewards_PG.std(1, keepdim=True) + 1e-6)


def train(advantages: Callable[[Tensor], Tensor], *, seed: int = 0) -> Iterator[Row]:
    """Run all steps, yielding what each one saw before its updates."""
    torch.manual_seed(seed)
    policy = LastTokenPolicy()
    engine = LastTokenPolicy().to(torch.bfloat16)
    optimizer = torch.optim.Adam(policy.parameters(), lr=LR)
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, STEPS + 1):
        engine.load_state_dict(policy.state_dict())
        first_P = torch.randint(0, VOCAB, (PROMPTS,), generator=generator)
        sequences_BT1, behave_BT = sample(engine, first_P.repeat_interleave(SAMPLES), generator)
        rewards_B = counting_reward(sequences_BT1)
        advantages_B = advantages(rewards_B.view(PROMPTS, SAMPLES)).flatten()
        with torch.no_grad():
            old_N = logprobs(policy, sequences_BT1).flatten()
        gap = measure_gap(old_N, behave_BT.flatten())
        for _ in range(PASSES):
            tokens = ppo_clip_loss(
                logprobs(policy, sequences_BT1).flatten(),
                old_N,
                advantages_B.repeat_interleave(TOKENS),
                clip_low=CLIP,
                clip_high=CLIP,
            )
            loss = tokens.loss_n.sum() / len(old_N)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield Row(step, rewards_B.mean().item(), *gap)


def measure_gap(old_N: Tensor, behave_N: Tensor) -> tuple[float, float]:
    """Mean and largest difference; the toy looks at it but does not correct for it."""
    correction = correction_weights(
        old_N,
        behave_N,
        kind="none",
        mode="truncate",
        cap=1.0,
        floor=0.0,
        mask_N=torch.ones_like(old_N, dtype=torch.bool),
        offsets=torch.arange(0, len(old_N) + 1, TOKENS),
    )
    return correction.gap_mean, correction.gap_max


def main() -> None:
    for title, advantages in (("library", grpo_advantages), ("plain formula", plain_advantages)):
        print(f"advantages: {title}")
        print("step   mean reward   gap mean   gap max")
        for row in train(advantages):
            if row.step in SHOWN_STEPS:
                gaps = f"{row.gap_mean:8.4f}   {row.gap_max:7.4f}"
                print(f"{row.step:4d}   {row.reward:11.2f}   {gaps}")


if __name__ == "__main__":
    main()
