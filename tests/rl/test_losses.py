"""The clipped loss: worked values, independence of the split, and tokens that must not matter."""

import dataclasses

import pytest
import torch
from torch import Tensor

from shardloop.config import GRPOConfig
from shardloop.errors import UsageError
from shardloop.objective import grpo_objective
from shardloop.rl.batch import Batch
from shardloop.rl.kl import kl_k3
from shardloop.rl.losses import ppo_clip_loss
from shardloop.rl.packing import pack
from tests.trainer.batches import make_random_batch


def loss_of_ratio(ratio: float, advantage: float) -> tuple[float, float]:
    """Loss of one token and its derivative with respect to the log-prob."""
    new_n = torch.tensor([ratio]).log().requires_grad_()
    part = ppo_clip_loss(
        new_n,
        torch.zeros(1),
        torch.tensor([advantage]),
        clip_low=0.2,
        clip_high=0.2,
        denominator=1,
    )
    (grad_n,) = torch.autograd.grad(part.loss, new_n)
    return part.loss.item(), grad_n.item()


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "grad"),
    [
        (1.0, 2.0, -1.2, 0.0),
        (-1.0, 10.0, 10.0, 10.0),
        (-1.0, 0.5, 0.8, 0.0),
        (1.0, 0.5, -0.5, -0.5),
        (1.0, 1.1, -1.1, -1.1),
    ],
)
def test_loss_and_gradient_of_one_token(
    advantage: float, ratio: float, loss: float, grad: float
) -> None:
    assert loss_of_ratio(ratio, advantage) == pytest.approx((loss, grad), rel=1e-6)


def test_low_and_high_clips_are_separate() -> None:
    new_n = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    advantages_n = torch.tensor([1.0, -1.0, 1.0, -1.0])
    part = ppo_clip_loss(
        new_n, torch.zeros(4), advantages_n, clip_low=0.1, clip_high=0.3, denominator=1
    )
    assert part.loss.item() == pytest.approx(2 * (-1.3 + 0.9))
    assert part.clip_fraction.item() == 4


def random_tokens(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    new_n, old_n, advantages_n = torch.randn(3, n, generator=generator, dtype=torch.float64) / 3
    weights_n = torch.rand(n, generator=generator, dtype=torch.float64)
    return new_n, old_n, advantages_n, weights_n


def split_loss(tokens: tuple[Tensor, ...], bounds: list[int]) -> tuple[Tensor, Tensor]:
    """All four parts, and the gradient, summed over micro-batches."""
    new_n = tokens[0].clone().requires_grad_()
    parts = torch.zeros(4, dtype=torch.float64)
    for low, high in zip([0, *bounds], [*bounds, len(new_n)], strict=True):
        piece = [values[low:high] for values in tokens[1:]]
        part = ppo_clip_loss(
            new_n[low:high],
            piece[0],
            piece[1],
            weights_n=piece[2],
            clip_low=0.2,
            clip_high=0.2,
            denominator=len(new_n),
        )
        part.loss.backward()
        parts += torch.stack([part.loss.detach(), part.clip_fraction, part.approx_kl, part.ratio])
    assert new_n.grad is not None
    return parts, new_n.grad


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("bounds", [[3], [1, 2, 3, 4, 5, 6], [0, 6, 6]])
def test_parts_and_gradient_are_the_same_for_any_split(seed: int, bounds: list[int]) -> None:
    tokens = random_tokens(seed, 7)
    whole, whole_grad = split_loss(tokens, [])
    parts, grad = split_loss(tokens, bounds)
    torch.testing.assert_close(parts, whole, rtol=1e-14, atol=1e-15)
    assert torch.equal(grad, whole_grad)


@pytest.mark.parametrize("size", [1, 2])
def test_token_mean_of_rows_of_lengths_1_and_3_is_half(size: int) -> None:
    rows = [torch.tensor([1.0]), torch.tensor([-1.0, -1.0, -1.0])]
    total = 0.0
    for start in range(0, 2, size):
        advantages_n = torch.cat(rows[start : start + size])
        zeros = torch.zeros_like(advantages_n)
        total += ppo_clip_loss(
            zeros, zeros, advantages_n, clip_low=0.2, clip_high=0.2, denominator=4
        ).loss.item()
    assert total == 0.5


def test_a_repeated_batch_with_a_row_denominator_has_the_same_loss() -> None:
    new_n, old_n, advantages_n, _ = random_tokens(0, 6)

    def loss(copies: int) -> Tensor:
        return ppo_clip_loss(
            new_n.repeat(copies),
            old_n.repeat(copies),
            advantages_n.repeat(copies),
            clip_low=0.2,
            clip_high=0.2,
            denominator=2 * copies,
        ).loss

    torch.testing.assert_close(loss(2), loss(1), rtol=1e-14, atol=0.0)


def objective_of_batch(batch: Batch, new_N: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Objective, parts and gradient of one micro-batch with all rows of the batch."""
    packed = pack(batch, [list(range(len(batch.lengths)))])
    new_N = new_N.clone().requires_grad_()
    objective, parts = grpo_objective(
        new_N[packed.flat_index_n], batch, packed, GRPOConfig(kl_coef=0.3, correction="token")
    )
    (grad_N,) = torch.autograd.grad(objective, new_N)
    return objective.detach(), parts, grad_N


def test_a_masked_token_changes_nothing_bit_for_bit() -> None:
    batch = make_random_batch(temperature=1.0)
    mask_N = batch.loss_mask_N
    clean = objective_of_batch(batch, batch.old_N + 0.1)
    names = ("advantages_N", "behave_N", "old_N", "ref_N", "weights_N")
    poison = {name: getattr(batch, name).masked_fill(~mask_N, torch.nan) for name in names}
    poisoned = dataclasses.replace(batch, **poison)
    dirty = objective_of_batch(poisoned, (batch.old_N + 0.1).masked_fill(~mask_N, -6.0))
    assert dirty[1] == clean[1]
    for ours, theirs in ((dirty[0], clean[0]), (dirty[2], clean[2])):
        assert torch.equal(ours, theirs)
    assert (dirty[2][~mask_N] == 0.0).all()
    assert (dirty[2][mask_N] != 0.0).any()


@pytest.mark.parametrize("denominator", [0.0, 8.0])
def test_no_tokens_cost_nothing_and_have_finite_gradients(denominator: float) -> None:
    new_N = torch.tensor([0.1, -0.3], requires_grad=True)
    empty = torch.zeros(0)
    part = ppo_clip_loss(
        new_N[:0], empty, empty, clip_low=0.2, clip_high=0.2, denominator=denominator
    )
    (grad_N,) = torch.autograd.grad(part.loss, new_N)
    assert part.loss.item() == part.clip_fraction.item() == part.approx_kl.item() == 0.0
    assert grad_N.tolist() == [0.0, 0.0]


def test_a_rank_without_tokens_adds_nothing_to_a_mean() -> None:
    """Means over all tokens, from ranks that have 3, none and 4 of them."""
    tokens = random_tokens(3, 7)
    parts = torch.zeros(4, dtype=torch.float64)
    for low, high in ((0, 3), (3, 3), (3, 7)):
        new_n, old_n, advantages_n, weights_n = (values[low:high] for values in tokens)
        part = ppo_clip_loss(
            new_n,
            old_n,
            advantages_n,
            weights_n=weights_n,
            clip_low=0.2,
            clip_high=0.2,
            denominator=7,
        )
        parts += torch.stack([part.loss, part.clip_fraction, part.approx_kl, part.ratio])
    new_n, old_n, advantages_n, weights_n = tokens
    ratio_n = (new_n - old_n).exp()
    loss_n = -torch.minimum(ratio_n * advantages_n, ratio_n.clamp(0.8, 1.2) * advantages_n)
    is_clipped_n = ratio_n.clamp(0.8, 1.2) * advantages_n < ratio_n * advantages_n
    approx_kl_n = ratio_n - 1 - ratio_n.log()
    rows = (loss_n * weights_n, is_clipped_n.double(), approx_kl_n, ratio_n)
    torch.testing.assert_close(parts, torch.stack([row.mean() for row in rows]))
    assert 0.0 < parts[1] < 1.0, "some tokens are clipped, and some are not"


def test_ratio_is_one_and_kl_zero_before_the_first_update() -> None:
    new_n, _, advantages_n, _ = random_tokens(1, 8)
    part = ppo_clip_loss(new_n, new_n, advantages_n, clip_low=0.2, clip_high=0.2, denominator=8)
    assert (part.ratio.item(), part.approx_kl.item(), part.clip_fraction.item()) == (1.0, 0.0, 0.0)
    assert torch.equal(part.loss, -advantages_n.sum() / 8)


def test_approx_kl_is_the_k3_of_old_against_new() -> None:
    new_n, old_n, advantages_n, _ = random_tokens(2, 8)
    part = ppo_clip_loss(new_n, old_n, advantages_n, clip_low=0.2, clip_high=0.2, denominator=8)
    torch.testing.assert_close(part.approx_kl, kl_k3(old_n, new_n).mean())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_an_extreme_ratio_has_finite_loss_and_gradient(advantage: float, log_ratio: float) -> None:
    new_n = torch.tensor([log_ratio], requires_grad=True)
    part = ppo_clip_loss(
        new_n,
        torch.zeros(1),
        torch.tensor([advantage]),
        clip_low=0.2,
        clip_high=0.2,
        denominator=1,
    )
    (grad_n,) = torch.autograd.grad(part.loss, new_n)
    assert part.loss.isfinite().all()
    assert grad_n.isfinite().all()


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [61.0, 59.0, 0.0, -59.0, -61.0])
def test_clipped_tokens_are_those_without_gradient(advantage: float, log_ratio: float) -> None:
    new_n = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    part = ppo_clip_loss(
        new_n,
        torch.zeros(1, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.2,
        denominator=1,
    )
    (grad_n,) = torch.autograd.grad(part.loss, new_n)
    assert part.clip_fraction.item() == (grad_n.item() == 0.0 and advantage != 0.0)


@pytest.mark.parametrize("old", [-torch.inf, torch.inf, torch.nan])
def test_an_old_log_prob_that_is_not_finite_is_refused(old: float) -> None:
    ones = torch.ones(2)
    with pytest.raises(UsageError, match="old log-prob is NaN or infinite"):
        ppo_clip_loss(
            ones, torch.tensor([0.0, old]), ones, clip_low=0.2, clip_high=0.2, denominator=2
        )


def test_weights_are_constants() -> None:
    new_n = torch.zeros(2, requires_grad=True)
    weights_n = torch.tensor([0.5, 2.0], requires_grad=True)
    part = ppo_clip_loss(
        new_n,
        torch.zeros(2),
        torch.ones(2),
        clip_low=0.2,
        clip_high=0.2,
        denominator=2,
        weights_n=weights_n,
    )
    part.loss.backward()
    assert new_n.grad is not None
    assert new_n.grad.tolist() == [-0.25, -1.0]
    assert weights_n.grad is None


def test_bad_arguments_are_refused() -> None:
    ones = torch.ones(2)
    with pytest.raises(UsageError, match="one value per scored token"):
        ppo_clip_loss(ones, ones[:1], ones, clip_low=0.2, clip_high=0.2, denominator=2)
    with pytest.raises(UsageError, match="number of loss tokens of the whole batch"):
        ppo_clip_loss(ones, ones, ones, clip_low=0.2, clip_high=0.2, denominator=0)
    with pytest.raises(UsageError, match=r"clip_low in \[0, 1\]"):
        ppo_clip_loss(ones, ones, ones, clip_low=1.2, clip_high=0.2, denominator=2)
