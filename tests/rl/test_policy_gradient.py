"""Expected gradients of the objective, by going through every batch that a small policy can draw.

The policy has three tokens and at most three turns; token 0 ends a sequence. With G = 2 samples of
one prompt there are 15 x 15 batches, so expectations are sums and no estimate is left to chance.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardloop.config import GRPOConfig
from shardloop.controller.batches import kl_of_rows
from shardloop.objective import grpo_objective
from shardloop.rl.advantages import group_advantages
from shardloop.rl.aggregation import token_scales
from shardloop.rl.batch import Batch
from shardloop.rl.correction import correction_weights
from shardloop.rl.packing import pack

V, MOST, G = 3, 3, 2
Sequence = tuple[int, ...]


def _sequences() -> list[Sequence]:
    """All that end with token 0, or at the limit without it."""
    every = (s for n in range(1, MOST + 1) for s in itertools.product(range(V), repeat=n))
    return [s for s in every if 0 not in s[:-1] and (s[-1] == 0 or len(s) == MOST)]


SEQUENCES = _sequences()
REWARD = {s: 1.0 * (1 in s) - 0.4 * (s[-1] == 2) + 0.1 * len(s) for s in SEQUENCES}


def table(seed: int) -> Tensor:
    """Logits of a policy: one row for each place and token before it, [MOST, V, V]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(MOST, V, V, generator=generator, dtype=torch.float64)


def token_logprobs(logits: Tensor, sequence: Sequence) -> Tensor:
    logprobs = logits.log_softmax(-1)
    before = (0, *sequence)
    return torch.stack([logprobs[t, before[t], token] for t, token in enumerate(sequence)])


def expectation(logits: Tensor, value: Any) -> Tensor:
    """E of value(sequence), differentiable in the policy."""
    terms = [token_logprobs(logits, s).sum().exp() * value(s) for s in SEQUENCES]
    return torch.stack(terms).sum()


def gradient(value: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(value, logits, materialize_grads=True)
    return found


@dataclass(frozen=True, kw_only=True)
class Policies:
    new: Tensor
    """With gradient; also `old`: the first update on a batch."""
    ref: Tensor
    engine: Tensor
    """What draws the samples."""


def policies(seed: int, *, off_policy: bool = False) -> Policies:
    new = table(seed)
    engine = new + 0.5 * table(seed + 200) if off_policy else new
    return Policies(new=new.clone().requires_grad_(), ref=table(seed + 100), engine=engine)


def expected_gradient(policy: Policies, config: GRPOConfig, *, constant: int | None) -> Tensor:
    """Of the library's objective over all batches, each as likely as the engine draws it.

    The order of the two rows does not matter: a pair of different ones counts twice."""
    new, entropy = Rows(policy.new), {s: _entropies(policy.new, s) for s in SEQUENCES}
    ref, engine = Rows(policy.ref), Rows(policy.engine)
    total = torch.zeros((), dtype=torch.float64)
    for rows in itertools.combinations_with_replacement(SEQUENCES, G):
        chance = (2 - (rows[0] == rows[1])) * engine.of(rows).detach().sum().exp()
        new_n = new.of(rows)
        batch = _batch(rows, new_n, ref.of(rows), engine.of(rows), config, constant=constant)
        packed = pack(batch, [[row] for row in range(G)])
        entropy_n = torch.cat([entropy[s] for s in rows])
        objective, _ = grpo_objective(new_n, entropy_n, batch, packed, config)
        total = total + chance * objective
    return gradient(total, policy.new)


class Rows:
    """Log-probs of every sequence's tokens, computed once."""

    def __init__(self, logits: Tensor) -> None:
        self._logprobs = {s: token_logprobs(logits, s) for s in SEQUENCES}

    def of(self, rows: tuple[Sequence, ...]) -> Tensor:
        return torch.cat([self._logprobs[s] for s in rows])


def _entropies(logits: Tensor, sequence: Sequence) -> Tensor:
    logprobs = logits.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return torch.stack([entropies[t, before] for t, before in enumerate((0, *sequence)[:-1])])


def _batch(
    rows: tuple[Sequence, ...],
    new_n: Tensor,
    ref_n: Tensor,
    engine_n: Tensor,
    config: GRPOConfig,
    *,
    constant: int | None,
) -> Batch:
    """One prompt token before each row; then what the loop's `batches` does."""
    offsets = torch.tensor([0, *(1 + len(s) for s in rows)]).cumsum(0)
    mask_N = torch.ones(int(offsets[-1]), dtype=torch.bool)
    mask_N[offsets[:-1]] = False

    def spread(values_n: Tensor) -> Tensor:
        return torch.zeros(len(mask_N), dtype=torch.float64).masked_scatter(mask_N, values_n)

    batch = Batch(
        token_ids_N=torch.zeros(len(mask_N), dtype=torch.int64),
        offsets=offsets,
        loss_mask_N=mask_N,
        old_N=spread(new_n.detach()),
        full_N=spread(engine_n.detach()),
        ref_N=spread(ref_n),
        scale_N=token_scales(
            config.aggregation,
            mask_N=mask_N,
            offsets=offsets,
            group_B=torch.zeros(G, dtype=torch.int64),
            constant=constant,
        ),
    )
    rewards_PG = torch.tensor([[REWARD[s] for s in rows]], dtype=torch.float64)
    if config.kl_coef and config.kl_in == "reward":
        rewards_PG = rewards_PG - config.kl_coef * kl_of_rows(batch, config)
    advantages_PG = group_advantages(
        config.advantage,
        rewards_PG,
        std=config.std,
        num_tokens_PG=torch.tensor([[len(s) for s in rows]]),
    )
    assert batch.old_N is not None and batch.full_N is not None
    correction = correction_weights(
        batch.old_N,
        batch.full_N,
        kind=config.correction,
        mode=config.correction_mode,
        cap=config.correction_cap,
        floor=config.correction_floor,
        mask_N=mask_N,
        offsets=offsets,
    )
    advantages_N = advantages_PG.flatten().repeat_interleave(offsets.diff()) * mask_N
    return replace(batch, advantages_N=advantages_N, weights_N=correction.weights_N)


def rewards(sequence: Sequence) -> float:
    return REWARD[sequence]


SUM: dict[str, Any] = {"aggregation": "sequence-sum"}
seeds = pytest.mark.parametrize("seed", [0])


def check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    assert expected.abs().max() > 1e-3


@seeds
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_on_policy_every_loss_has_the_true_gradient_with_leave_one_out(
    seed: int, loss: Any
) -> None:
    policy = policies(seed)
    config = GRPOConfig(**SUM, loss=loss, advantage="rloo", correction="none")
    found = expected_gradient(policy, config, constant=1)
    check(found, -gradient(expectation(policy.new, rewards), policy.new))


@seeds
def test_the_groups_own_mean_shortens_the_true_gradient_by_one_in_g(seed: int) -> None:
    """Dr. GRPO: each sample is in its own baseline, and sums are over a constant."""
    policy = policies(seed)
    config = GRPOConfig(**SUM, std="none", correction="none")
    found = expected_gradient(policy, config, constant=7)
    true = gradient(expectation(policy.new, rewards), policy.new)
    check(found, -true * (G - 1) / G / 7)


@seeds
def test_means_over_tokens_weigh_short_sequences_more(seed: int) -> None:
    """Sequence-mean: each sequence's part of the true gradient is divided by its length."""
    policy = policies(seed)
    config = GRPOConfig(aggregation="sequence-mean", advantage="rloo", correction="none")
    found = expected_gradient(policy, config, constant=None)
    baseline = expectation(policy.new, rewards).detach()

    def surrogate(s: Sequence) -> Tensor:
        return (REWARD[s] - baseline) / len(s) * token_logprobs(policy.new, s).sum()

    with torch.no_grad():
        chances = [token_logprobs(policy.new, s).sum().exp() for s in SEQUENCES]
    slow = sum(chance * surrogate(s) for chance, s in zip(chances, SEQUENCES, strict=True))
    check(found, -gradient(torch.as_tensor(slow), policy.new))
    unbiased = -gradient(expectation(policy.new, rewards), policy.new)
    assert not torch.allclose(found / found.norm(), unbiased / unbiased.norm(), atol=1e-2)


@seeds
def test_k1_in_the_reward_has_the_gradient_of_the_sequences_kl(seed: int) -> None:
    policy = policies(seed)
    config = GRPOConfig(
        **SUM, advantage="rloo", correction="none", kl_coef=0.3, kl_in="reward", kl_estimator="k1"
    )
    found = expected_gradient(policy, config, constant=1)

    def value(s: Sequence) -> Tensor:
        gap = token_logprobs(policy.new, s) - token_logprobs(policy.ref, s)
        return REWARD[s] - 0.3 * gap.sum()

    check(found, -gradient(expectation(policy.new, value), policy.new))


@seeds
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_in_the_loss_counts_each_token_with_what_stands_before_it_held_fixed(
    seed: int, estimator: Any
) -> None:
    """k1: nothing; k2: Σ over places of KL(policy || reference) there; k3: the other way round."""
    policy = policies(seed)
    plain = GRPOConfig(**SUM, advantage="rloo", correction="none")
    with_kl = replace(plain, kl_coef=0.3, kl_estimator=estimator)
    found = expected_gradient(policy, with_kl, constant=1)
    found = found - expected_gradient(policy, plain, constant=1)
    new, ref = policy.new.log_softmax(-1), policy.ref.log_softmax(-1)
    kls = {
        "k1": torch.zeros_like(new).sum(-1) * new.sum(-1),
        "k2": (new.exp() * (new - ref)).sum(-1),
        "k3": (ref.exp() * (ref - new)).sum(-1),
    }[estimator]
    expected = 0.3 * gradient(_sum_over_visits(policy, kls), policy.new)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    whole = 0.3 * gradient(expectation(policy.new, lambda s: _gap(policy, s)), policy.new)
    assert not torch.allclose(found, whole, atol=1e-3), "tokens also decide what comes after them"


def _gap(policy: Policies, s: Sequence) -> Tensor:
    return (token_logprobs(policy.new, s) - token_logprobs(policy.ref, s)).sum()


def _sum_over_visits(policy: Policies, values: Tensor) -> Tensor:
    """E over sequences, as constant chances, of Σ_t values[t, token before t]."""
    total = torch.zeros((), dtype=torch.float64)
    for s in SEQUENCES:
        chance = token_logprobs(policy.new, s).sum().exp().detach()
        total = total + chance * sum(values[t, b] for t, b in enumerate((0, *s)[:-1]))
    return total


@seeds
def test_an_entropy_bonus_pushes_the_entropy_of_every_place_up(seed: int) -> None:
    policy = policies(seed)
    plain = GRPOConfig(**SUM, advantage="rloo", correction="none")
    found = expected_gradient(policy, replace(plain, entropy_coef=0.3), constant=1)
    found = found - expected_gradient(policy, plain, constant=1)
    new = policy.new.log_softmax(-1)
    entropies = -(new.exp() * new).sum(-1)
    check(found, -0.3 * gradient(_sum_over_visits(policy, entropies), policy.new))


@seeds
@pytest.mark.parametrize("kind", ["sequence", "token", "geometric", "none"])
def test_only_the_product_of_a_rows_ratios_makes_another_programs_samples_unbiased(
    seed: int, kind: Any
) -> None:
    policy = policies(seed, off_policy=True)
    config = GRPOConfig(**SUM, advantage="rloo", correction=kind)
    if kind != "none":
        config = replace(config, correction_cap=1e6)
    found = expected_gradient(policy, config, constant=1)
    true = -gradient(expectation(policy.new, rewards), policy.new)
    if kind == "sequence":
        check(found, true)
    else:
        assert not torch.allclose(found, true, atol=1e-3)


@seeds
def test_grpos_std_takes_the_size_out_of_a_lead(seed: int) -> None:
    """With G = 2 the gradient is that of the chance to win against the other sample, over √2."""
    policy = policies(seed)
    found = expected_gradient(policy, GRPOConfig(**SUM, correction="none"), constant=1)
    logprobs = {s: token_logprobs(policy.new, s).sum() for s in SEQUENCES}
    total = torch.zeros((), dtype=torch.float64)
    for one, other in itertools.product(SEQUENCES, repeat=2):
        sign = (REWARD[one] > REWARD[other]) - (REWARD[one] < REWARD[other])
        chance = (logprobs[one] + logprobs[other]).exp().detach()
        total = total + chance * sign * logprobs[one]
    expected = -gradient(total, policy.new) / 2**0.5
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)  # eps in the std
