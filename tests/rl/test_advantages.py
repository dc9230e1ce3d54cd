"""Advantages: what a group of rewards becomes."""

import pytest
import torch

from shardloop.config import Std
from shardloop.errors import UsageError
from shardloop.rl.advantages import grpo_advantages


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
