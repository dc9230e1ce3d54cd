"""The judged groups of one step: drawn in rounds, until enough of them can teach. Floor 4.

Called by the loop. Without resampling there is one round, and every group is kept.

    prompts ─▶ rollout ─▶ score ─▶ groups ──can teach──▶ kept, until there are P
       ▲                             └──────cannot─────▶ counted in the metrics only
       └────────── further round ◀──── fewer than P, rounds left

A group can teach where its rewards differ and the loss takes one of its completions.

Shape letters: P prompts, G samples per prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardloop.config import GRPOConfig, TrainConfig
from shardloop.controller.rollouts import Rollout, Sampler, step_seed
from shardloop.controller.scoring import Sample, score_rollouts
from shardloop.metrics import PhaseTimes
from shardloop.rl.overlong import overlong_penalty
from shardloop.types import Completion, Prompt, RewardFn, Task


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """The completions of one prompt, judged."""

    rollout: Rollout
    samples: Sequence[Sample]
    shaped_G: Tensor
    """float64: what is learned from, the task's rewards and the penalty of overlong completions."""

    def can_teach(self, grpo: GRPOConfig) -> bool:
        """Whether there is something to choose between them, and one of them is in the loss."""
        is_flat = bool(self.shaped_G.max() == self.shaped_G.min())
        return not is_flat and not all(is_masked(c, grpo) for c in self.rollout.completions)


def is_masked(completion: Completion, grpo: GRPOConfig) -> bool:
    """Whether the loss leaves a completion out for having been cut off."""
    return grpo.overlong == "mask" and completion.finish_reason == "length"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Drawn:
    groups: Sequence[Group]
    """All that were sampled, round by round."""
    kept: Sequence[Group]
    """Those to train on, at most P and perhaps none."""
    num_rounds: int


def draw_groups(
    sampler: Sampler,
    *,
    task: Task,
    reward: RewardFn,
    config: TrainConfig,
    step: int,
    times: PhaseTimes,
) -> Drawn:
    """Sample and judge the groups of `step`, on the weights that the engine has.

    With `grpo.resample_rounds` (DAPO's dynamic sampling) a round draws P further prompts while
    fewer than P groups that can teach are there; what came first is kept. Each round has
    prompts and noise of its own, both pure functions of the run's seed, the step and the round.

    Raises:
        As `Sampler.rollout` and `score_rollouts`.
    """
    grpo = config.grpo
    wanted = grpo.prompts_per_step
    groups: list[Group] = []
    for number in range(grpo.resample_rounds + 1):
        with times.phase("rollout"):
            rollouts = sampler.rollout(
                round_prompts(task, config, step=step, number=number),
                samples_per_prompt=grpo.samples_per_prompt,
                seed=round_seed(config.seed, step, number),
            )
        with times.phase("score"):
            groups += judge(rollouts, sampler, reward=reward, config=config)
        kept = groups if grpo.resample_rounds == 0 else [g for g in groups if g.can_teach(grpo)]
        if len(kept) >= wanted:
            break
    return Drawn(groups=groups, kept=kept[:wanted], num_rounds=number + 1)


def round_prompts(task: Task, config: TrainConfig, *, step: int, number: int) -> Sequence[Prompt]:
    """P prompts. Each step has room in the stream for all of its rounds, drawn or not: so where a
    step starts does not depend on the steps before."""
    count = config.grpo.prompts_per_step
    place = step * (config.grpo.resample_rounds + 1) + number
    return task.prompts("train", seed=config.seed, start=place * count, count=count)


def round_seed(seed: int, step: int, number: int) -> int:
    """Of one round's noise; the first round has the step's."""
    of_step = step_seed(seed, step)
    return step_seed(of_step, number) if number else of_step


def judge(
    rollouts: Sequence[Rollout], sampler: Sampler, *, reward: RewardFn, config: TrainConfig
) -> list[Group]:
    scores = score_rollouts(rollouts, reward=reward, tokenizer=sampler.tokenizer)
    num_samples = scores.rewards_PG.shape[1]
    return [
        Group(
            rollout=rollout,
            samples=scores.samples[place * num_samples : (place + 1) * num_samples],
            shaped_G=scores.rewards_PG[place] + penalties(rollout, config),
        )
        for place, rollout in enumerate(rollouts)
    ]


def penalties(rollout: Rollout, config: TrainConfig) -> Tensor:
    """float64 [G]: what each completion loses by its length, by the tokens that the policy chose;
    0 unless `grpo.overlong` is "penalty"."""
    lengths_G = torch.tensor([sum(c.loss_mask_T) for c in rollout.completions])
    if config.grpo.overlong != "penalty":
        return torch.zeros(len(lengths_G), dtype=torch.float64)
    return overlong_penalty(
        lengths_G, max_tokens=config.sampling.max_tokens, buffer=config.grpo.overlong_buffer
    )
