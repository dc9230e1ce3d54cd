"""Advantages: what a group of rewards becomes."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from shardloop.config import AdvantageKind, Std
from shardloop.errors import UsageError
from shardloop.rl.advantages import (
    group_advantages,
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
    whiten,
)


def slow_advantages(rewards: list[float], ddof: int) -> list[float]:
    mean = sum(rewards) / len(rewards)
    std = (sum((r - mean) ** 2 for r in rewards) / (len(rewards) - ddof)) ** 0.5
    return [(r - mean) / (std + 1e-6) for r in rewards]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("std", "ddof"), [("sample", 1), ("population", 0)])
def test_advantages_equal_the_slow_formula(seed: int, std: Std, ddof: int) -> None:
    rewards_PG = torch.rand(6, 5, generator=torch.Generator().manual_seed(seed)).double()
    expected = torch.tensor([slow_advantages(row, ddof) for row in rewards_PG.tolist()])
    torch.testing.assert_close(grpo_advantages(rewards_PG, std=std).float(), expected)


@pytest.mark.parametrize("value", [0.35, 0.7, 1 / 3, 0.0, 1e6 + 0.1])
@pytest.mark.parametrize("std", ["sample", "population", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", [2, 7, 8])
def test_equal_rewards_give_exactly_zero(
    value: float, std: Std, dtype: torch.dtype, group: int
) -> None:
    advantages = grpo_advantages(torch.full((3, group), value, dtype=dtype), std=std)
    assert torch.equal(advantages, torch.zeros(3, group, dtype=dtype))


def test_rewards_that_differ_by_rounding_are_not_blown_up() -> None:
    rewards_PG = torch.tensor([[0.3, 0.1 + 0.2, 0.3, 0.3]], dtype=torch.float64)
    assert rewards_PG.max() > rewards_PG.min()
    assert grpo_advantages(rewards_PG).abs().max() < 1e-9


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
def test_a_lone_better_sample_keeps_its_size_far_from_zero(offset: float) -> None:
    # mean of squares minus square of the mean would lose these stds in float32
    rewards_PG = torch.tensor([[0.0] * 7 + [1.0]]) + offset
    expected = torch.tensor([[-0.125 / 8**-0.5] * 7 + [0.875 / 8**-0.5]])
    torch.testing.assert_close(grpo_advantages(rewards_PG), expected, rtol=1e-5, atol=0.0)


def test_baseline_is_the_mean_of_the_whole_group() -> None:
    advantages = grpo_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), std="none")
    assert advantages.tolist() == [[0.75, -0.25, -0.25, -0.25]]


def test_statistics_never_cross_groups() -> None:
    advantages = grpo_advantages(torch.tensor([[1.0, 0.0], [10.0, 9.0]]))
    half_root = 0.5**0.5
    expected = torch.tensor([[half_root, -half_root]] * 2)
    torch.testing.assert_close(advantages, expected, rtol=0.0, atol=2e-6)


def exact_advantages(rewards: list[float], ddof: int | None) -> list[float]:
    """In fractions and integer square roots, where nothing overflows."""
    exact = [Fraction(reward) for reward in rewards]
    mean = sum(exact) / len(exact)
    if ddof is None:
        return [float(reward - mean) for reward in exact]
    variance = sum((reward - mean) ** 2 for reward in exact) / (len(exact) - ddof)
    fine = 10**40
    std = Fraction(math.isqrt(int(variance * fine**2)), fine)
    return [float((reward - mean) / (std + Fraction(1e-6))) for reward in exact]


@pytest.mark.parametrize("std", ["sample", "population", "none"])
@pytest.mark.parametrize(
    "rewards",
    [
        [1e308, 1.7e308, 1.2e308],
        [1e200, -1e200],
        [1.7e308, -1.7e308],
        [1e300, 0.0, 1.0, 2.0],
        [1e-200, 3e-200],
        [5.0, 1e-300, -1e-300],
    ],
)
def test_no_size_of_reward_overflows_or_vanishes(rewards: list[float], std: Std) -> None:
    ddof = {"sample": 1, "population": 0, "none": None}[std]
    advantages = grpo_advantages(torch.tensor([rewards], dtype=torch.float64), std=std)
    expected = exact_advantages(rewards, ddof)
    assert advantages[0].tolist() == pytest.approx(expected, rel=1e-14, abs=0.0)


@pytest.mark.parametrize("std", ["sample", "population", "none"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 7.0, 1e6])
def test_scaling_within_changes_no_bit_of_ordinary_rewards(
    seed: int, size: float, std: Std
) -> None:
    rewards = torch.randn(200, 8, dtype=torch.float64) * size
    centred = rewards - rewards.mean(1, keepdim=True)
    if std == "none":
        plain = centred
    else:
        plain = centred / (rewards.std(1, correction=int(std == "sample"), keepdim=True) + 1e-6)
    assert torch.equal(grpo_advantages(rewards, std=std), plain)


def test_an_advantage_too_large_for_its_dtype_is_refused() -> None:
    largest = torch.finfo(torch.float32).max
    with pytest.raises(UsageError, match="advantages of prompt 1 are"):
        grpo_advantages(torch.tensor([[1.0, 0, 0], [largest, -largest, -largest]]), std="none")


@pytest.mark.parametrize("eps", [0.0, -1e-6, float("nan"), float("inf")])
def test_eps_is_above_zero(eps: float) -> None:
    with pytest.raises(UsageError, match="choose a finite value above 0"):
        grpo_advantages(torch.tensor([[0.0, 1.0]]), eps=eps)


@pytest.mark.parametrize("shape", [(4, 1), (4,), (2, 2, 2)])
def test_a_group_of_one_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="at least 2 samples per prompt"):
        grpo_advantages(torch.ones(shape))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rewards_that_are_not_finite_are_refused_by_prompt(bad: float) -> None:
    with pytest.raises(UsageError, match="rewards of prompt 1 are"):
        grpo_advantages(torch.tensor([[0.0, 1.0], [bad, 1.0]]))


def test_an_unknown_std_is_refused() -> None:
    with pytest.raises(UsageError, match="choose sample, population or none"):
        grpo_advantages(torch.tensor([[0.0, 1.0]]), std="batch")  # type: ignore[arg-type]


def test_dtype_follows_the_rewards() -> None:
    assert grpo_advantages(torch.tensor([[0, 1]])).dtype == torch.float32
    assert grpo_advantages(torch.tensor([[0.0, 1.0]]).double()).dtype == torch.float64


KINDS: list[AdvantageKind] = ["grpo", "rloo", "reinforce++"]


def random_groups(seed: int, *, prompts: int = 5, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards_PG = torch.rand(prompts, size, generator=generator, dtype=torch.float64)
    return rewards_PG, torch.randint(1, 9, (prompts, size), generator=generator)


def test_each_kind_has_its_worked_number() -> None:
    rewards_PG, ones_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0]]), torch.ones(1, 4, dtype=torch.int64)
    for kind, size in (("grpo", 0.8660), ("rloo", 0.6667), ("reinforce++", 0.8660)):
        advantages_PG = group_advantages(kind, rewards_PG, std="sample", num_tokens_PG=ones_PG)  # type: ignore[arg-type]
        assert advantages_PG.tolist()[0] == pytest.approx([size, -size, -size, size], abs=5e-5)


@pytest.mark.parametrize("seed", range(5))
def test_rloo_equals_the_mean_of_the_others(seed: int) -> None:
    rewards_PG, _ = random_groups(seed)
    expected = [
        [reward - (sum(row) - reward) / (len(row) - 1) for reward in row]
        for row in rewards_PG.tolist()
    ]
    expected_PG = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(rloo_advantages(rewards_PG), expected_PG, rtol=1e-12, atol=1e-14)


def test_a_lone_better_sample_gets_its_lead_over_the_others_and_not_thousands() -> None:
    rewards_PG = torch.tensor([[0.35] * 7 + [0.95]])
    # the std of the other seven, by mean of squares minus square of the mean in float32
    others = rewards_PG[0, :7]
    residue = (others.square().mean() - others.mean().square()).abs().sqrt()
    assert 0.6 / residue > 1000, "this is the trap"
    assert rloo_advantages(rewards_PG)[0].tolist() == pytest.approx([-0.6 / 7] * 7 + [0.6])
    for kind in KINDS:
        advantages_PG = group_advantages(
            kind, rewards_PG, std="sample", num_tokens_PG=torch.ones(1, 8, dtype=torch.int64)
        )
        assert advantages_PG.abs().max() < 2.5


@pytest.mark.parametrize("seed", range(5))
def test_reinforce_pp_whitens_the_tokens_of_the_batch_written_out_one_by_one(seed: int) -> None:
    rewards_PG, num_tokens_PG = random_groups(seed)
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    tokens = centred_PG.flatten().repeat_interleave(num_tokens_PG.flatten())
    expected_PG = (centred_PG - tokens.mean()) / (tokens.std() + 1e-6)
    advantages_PG = reinforce_pp_advantages(rewards_PG, num_tokens_PG=num_tokens_PG)
    torch.testing.assert_close(advantages_PG, expected_PG)
    spread = advantages_PG.flatten().repeat_interleave(num_tokens_PG.flatten())
    assert spread.mean().item() == pytest.approx(0.0, abs=1e-12)
    assert spread.std().item() == pytest.approx(1.0, abs=1e-4)


def test_whitening_is_over_the_batch_and_not_over_a_shard() -> None:
    ones = torch.ones(4, dtype=torch.int64)
    whole = whiten(torch.tensor([1.0, 2.0, 5.0, 6.0]), num_tokens=ones)
    assert whole.tolist() == pytest.approx([-1.0502, -0.6301, 0.6301, 1.0502], abs=5e-5)
    for shard in ([1.0, 2.0], [5.0, 6.0]):
        local = whiten(torch.tensor(shard), num_tokens=ones[:2])
        assert local.tolist() == pytest.approx([-0.7071, 0.7071], abs=5e-5)


def test_one_group_of_larger_spread_gets_larger_advantages_from_reinforce_pp() -> None:
    rewards_PG = torch.tensor([[1.0, 0.0], [0.6, 0.4]])
    ones_PG = torch.ones(2, 2, dtype=torch.int64)
    advantages_PG = reinforce_pp_advantages(rewards_PG, num_tokens_PG=ones_PG)
    assert (advantages_PG[0] / advantages_PG[1]).tolist() == pytest.approx([5.0, 5.0], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0.35, 0.7, 1e6 + 0.1])
def test_a_group_of_equal_rewards_is_exactly_zero_beside_others(
    kind: AdvantageKind, value: float
) -> None:
    rewards_PG = torch.tensor([[value] * 4, [1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    num_tokens_PG = torch.tensor([[1, 2, 3, 4], [9, 1, 1, 1]])
    advantages_PG = group_advantages(kind, rewards_PG, std="sample", num_tokens_PG=num_tokens_PG)
    assert advantages_PG[0].tolist() == [0.0] * 4
    assert (advantages_PG[1] != 0.0).all()
    flat_PG = torch.stack([rewards_PG[0], rewards_PG[0] * 3])
    nothing_PG = group_advantages(kind, flat_PG, std="sample", num_tokens_PG=num_tokens_PG)
    assert nothing_PG.tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("tokens", [[[0, 0], [0, 0]], [[1, 0], [0, 0]], [[3, 0], [2, 0]]])
def test_completions_without_tokens_count_for_nothing_and_give_no_nan(
    tokens: list[list[int]],
) -> None:
    rewards_PG = torch.tensor([[1.0, 0.0], [0.0, 5.0]])
    advantages_PG = reinforce_pp_advantages(rewards_PG, num_tokens_PG=torch.tensor(tokens))
    assert advantages_PG.isfinite().all()


def test_no_reward_that_is_not_finite_and_no_group_of_one_passes_any_kind() -> None:
    for kind in KINDS:
        for rewards, message in (
            ([[0.0], [1.0]], "at least 2 samples"),
            ([[0.0, 1.0], [torch.nan, 1.0]], "rewards of prompt 1 are"),
        ):
            rewards_PG = torch.tensor(rewards)
            with pytest.raises(UsageError, match=message):
                group_advantages(
                    kind,
                    rewards_PG,
                    std="sample",
                    num_tokens_PG=torch.ones_like(rewards_PG, dtype=torch.int64),
                )


def test_counts_of_another_shape_and_unknown_kinds_are_refused() -> None:
    rewards_PG = torch.tensor([[0.0, 1.0]])
    with pytest.raises(UsageError, match="one count of 0 or more for each value"):
        reinforce_pp_advantages(rewards_PG, num_tokens_PG=torch.tensor([1, 2]))
    with pytest.raises(UsageError, match="choose grpo, rloo or reinforce"):
        group_advantages("ppo", rewards_PG, std="none", num_tokens_PG=rewards_PG)  # type: ignore[arg-type]
