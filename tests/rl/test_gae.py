"""Generalised advantages of ragged rows, against the sum that defines them."""

import pytest
import torch

from shardloop.errors import UsageError
from shardloop.rl.gae import GAE, gae_advantages


def slow_row(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Σ_k (gamma lam)^k δ_{t+k}, written out for every token."""
    after = [*values[1:], 0.0][: len(values)]
    deltas = [r + gamma * v for r, v in zip(rewards, after, strict=True)]
    deltas = [d - v for d, v in zip(deltas, values, strict=True)]
    return [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[start:]))
        for start in range(len(deltas))
    ]


def random_rows(seed: int) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (6,), generator=generator).tolist()
    rewards_N, values_N = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    mask_N = torch.rand(sum(lengths), generator=generator) < 0.6
    mask_N[lengths[0] : lengths[0] + lengths[1]] = False  # a row without loss tokens
    return lengths, rewards_N, values_N, mask_N


def gae(lengths: list[int], *tensors: torch.Tensor, gamma: float = 0.9, lam: float = 0.8) -> GAE:
    rewards_N, values_N, mask_N = tensors
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return gae_advantages(rewards_N, values_N, mask_N=mask_N, offsets=offsets, gamma=gamma, lam=lam)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("gamma", "lam"), [(0.9, 0.8), (1.0, 1.0), (1.0, 0.0), (0.0, 0.5)])
def test_advantages_equal_the_slow_sum_over_loss_tokens(
    seed: int, gamma: float, lam: float
) -> None:
    lengths, rewards_N, values_N, mask_N = random_rows(seed)
    result = gae(lengths, rewards_N, values_N, mask_N, gamma=gamma, lam=lam)
    start = 0
    for length in lengths:
        row = slice(start, start + length)
        mask = mask_N[row]
        expected = slow_row(rewards_N[row][mask].tolist(), values_N[row][mask].tolist(), gamma, lam)
        assert result.advantages_N[row][mask].tolist() == pytest.approx(expected)
        start += length
    assert not result.advantages_N[~mask_N].any()
    assert not result.returns_N[~mask_N].any()
    torch.testing.assert_close(result.returns_N[mask_N], (result.advantages_N + values_N)[mask_N])


def test_worked_numbers() -> None:
    rewards_N, values_N = torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.6, 0.7]], dtype=torch.float64)
    mask_N = torch.ones(3, dtype=torch.bool)
    for lam, expected in ((1.0, [0.5, 0.4, 0.3]), (0.0, [0.1, 0.1, 0.3])):
        result = gae([3], rewards_N, values_N, mask_N, gamma=1.0, lam=lam)
        assert result.advantages_N.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(3))
def test_tool_tokens_are_skipped_whatever_they_hold(seed: int) -> None:
    lengths, rewards_N, values_N, mask_N = random_rows(seed)
    clean = gae(lengths, rewards_N, values_N, mask_N)
    poisoned = (tensor.masked_fill(~mask_N, torch.nan) for tensor in (rewards_N, values_N))
    dirty = gae(lengths, *poisoned, mask_N)
    assert torch.equal(dirty.advantages_N, clean.advantages_N)
    assert torch.equal(dirty.returns_N, clean.returns_N)


def test_a_value_function_that_is_right_leaves_no_advantage() -> None:
    rewards_N = torch.tensor([0.0, 0.0, 1.0, 0.0, 2.0], dtype=torch.float64)
    values_N = torch.tensor([0.81, 0.9, 1.0, 1.8, 2.0], dtype=torch.float64)
    result = gae([3, 2], rewards_N, values_N, torch.ones(5, dtype=torch.bool), gamma=0.9)
    torch.testing.assert_close(result.advantages_N, torch.zeros(5, dtype=torch.float64))


def test_no_loss_tokens_give_zeros() -> None:
    result = gae([2, 1], torch.ones(3), torch.ones(3), torch.zeros(3, dtype=torch.bool))
    assert result.advantages_N.tolist() == result.returns_N.tolist() == [0.0] * 3


def test_bad_arguments_are_refused() -> None:
    ones, mask_N = torch.ones(2), torch.ones(2, dtype=torch.bool)
    with pytest.raises(UsageError, match=r"lam=1\.1; choose a value in \[0, 1\]"):
        gae([2], ones, ones, mask_N, lam=1.1)
    with pytest.raises(UsageError, match="each needs one a token"):
        gae([3], ones, ones, mask_N)
    with pytest.raises(UsageError, match="NaN or infinite"):
        gae([2], ones * torch.nan, ones, mask_N)
