"""Policy losses of single tokens: worked values, gradients, clips, and what is refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardloop.errors import UsageError
from shardloop.rl.losses import TokenLoss, cispo_loss, gspo_loss, ppo_clip_loss

CLIPS = {"clip_low": 0.2, "clip_high": 0.2}


def ppo(new_n: Tensor, old_n: Tensor, advantages_n: Tensor) -> TokenLoss:
    return ppo_clip_loss(new_n, old_n, advantages_n, **CLIPS)


def gspo(new_n: Tensor, old_n: Tensor, advantages_n: Tensor) -> TokenLoss:
    """Two tokens a row."""
    return gspo_loss(new_n, old_n, advantages_n, row_n=torch.arange(len(new_n)) // 2, **CLIPS)


def cispo(new_n: Tensor, old_n: Tensor, advantages_n: Tensor) -> TokenLoss:
    return cispo_loss(new_n, old_n, advantages_n, **CLIPS)


each_loss = pytest.mark.parametrize("loss", [ppo, gspo, cispo])
Loss = Callable[[Tensor, Tensor, Tensor], TokenLoss]


def of_ratio(
    ratio: float, advantage: float, *, dual_clip: float | None = None
) -> tuple[float, float, bool]:
    """Loss of one token, its derivative with respect to the log-prob, and whether it is clipped."""
    new_n = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    part = ppo_clip_loss(
        new_n, torch.zeros_like(new_n), new_n.new_tensor([advantage]), **CLIPS, dual_clip=dual_clip
    )
    (grad_n,) = torch.autograd.grad(part.loss_n.sum(), new_n)
    return part.loss_n.item(), grad_n.item(), bool(part.is_clipped_n)


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
    assert of_ratio(ratio, advantage) == pytest.approx((loss, grad, grad == 0.0))


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "grad"),
    [
        (-1.0, 10.0, 3.0, 0.0),
        (-2.0, 10.0, 6.0, 0.0),
        (-1.0, 2.9, 2.9, 2.9),
        (1.0, 10.0, -1.2, 0.0),
        (1.0, 0.01, -0.01, -0.01),
        (-1.0, 0.5, 0.8, 0.0),
        (0.0, 10.0, 0.0, 0.0),
    ],
)
def test_a_dual_clip_bounds_the_cost_of_negative_advantages_alone(
    advantage: float, ratio: float, loss: float, grad: float
) -> None:
    clipped = grad == 0.0 and advantage != 0.0
    assert of_ratio(ratio, advantage, dual_clip=3.0) == pytest.approx((loss, grad, clipped))


def test_low_and_high_clips_are_separate() -> None:
    new_n = torch.tensor([1.5, 0.5, 1.5, 0.5]).log()
    advantages_n = torch.tensor([1.0, -1.0, 1.0, -1.0])
    part = ppo_clip_loss(new_n, torch.zeros(4), advantages_n, clip_low=0.1, clip_high=0.3)
    assert part.loss_n.tolist() == pytest.approx([-1.3, 0.9, -1.3, 0.9])
    assert part.is_clipped_n.all()


def random_tokens(seed: int, n: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    new_n, old_n, advantages_n = torch.randn(3, n, generator=generator, dtype=torch.float64) / 3
    return new_n.requires_grad_(), old_n, advantages_n


def slow_gspo(
    new_n: Tensor, old_n: Tensor, advantages_n: Tensor, row_n: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows one by one: the paper's loss averaged over rows and its gradient, each row with one
    advantage."""
    rows = []
    for row in row_n.unique():
        of_row = row_n == row
        ratio = (new_n - old_n)[of_row].mean().exp()
        advantage = advantages_n[of_row][0]
        rows.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    loss = torch.stack(rows).mean()
    return loss, torch.autograd.grad(loss, new_n)[0]


@pytest.mark.parametrize("seed", range(5))
def test_gspo_averaged_over_rows_is_the_loss_of_whole_sequences(seed: int) -> None:
    new_n, old_n, advantages_n = random_tokens(seed)
    # rows of 1, 3, 6 and 2 tokens in any order
    row_n = torch.tensor([4, 1, 1, 1, 9, 9, 9, 9, 9, 9, 2, 2])
    advantages_n = advantages_n[row_n]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    row_n, advantages_n = row_n[order], advantages_n[order]
    expected = slow_gspo(new_n, old_n, advantages_n, row_n)
    part = gspo_loss(new_n, old_n, advantages_n, row_n=row_n, **CLIPS)
    counts_n = torch.tensor([int((row_n == row).sum()) for row in row_n])
    loss = (part.loss_n / counts_n / 4).sum()
    (grad_n,) = torch.autograd.grad(loss, new_n)
    torch.testing.assert_close((loss, grad_n), expected, rtol=1e-13, atol=1e-15)


def test_gspo_takes_the_geometric_mean_of_a_row_and_clips_it_as_a_whole() -> None:
    new_n = torch.tensor([0.6, -0.2], dtype=torch.float64, requires_grad=True)
    zeros, ones = torch.zeros_like(new_n), torch.ones_like(new_n)
    row_n = torch.zeros(2, dtype=torch.int64)
    for clip, losses, grads in ((0.2, [-1.2] * 2, [0.0] * 2), (0.3, [-1.2214] * 2, [-1.2214] * 2)):
        part = gspo_loss(new_n, zeros, ones, row_n=row_n, clip_low=clip, clip_high=clip)
        (grad_n,) = torch.autograd.grad(part.loss_n.sum(), new_n)
        assert part.loss_n.tolist() == pytest.approx(losses, abs=5e-5)
        assert grad_n.tolist() == pytest.approx(grads, abs=5e-5)
        assert part.is_clipped_n.tolist() == [clip == 0.2] * 2
    assert part.log_ratio_n.tolist() == pytest.approx([0.6, -0.2])


def test_cispo_keeps_the_gradient_of_a_clipped_token() -> None:
    new_n = torch.tensor([0.5], dtype=torch.float64).log().requires_grad_()
    part = cispo(new_n, new_n.new_tensor([0.25]).log(), torch.ones_like(new_n))
    (grad_n,) = torch.autograd.grad(part.loss_n.sum(), new_n)
    assert part.loss_n.item() == pytest.approx(0.8318, abs=5e-5)
    assert grad_n.item() == pytest.approx(-1.2)
    assert part.is_clipped_n.item()


@pytest.mark.parametrize("seed", range(3))
def test_gradient_of_cispo_is_minus_the_clipped_ratio_times_the_advantage(seed: int) -> None:
    new_n, old_n, advantages_n = random_tokens(seed)
    (grad_n,) = torch.autograd.grad(cispo(new_n, old_n, advantages_n).loss_n.sum(), new_n)
    expected_n = -(new_n - old_n).exp().clamp(0.8, 1.2) * advantages_n
    torch.testing.assert_close(grad_n, expected_n.detach())


@each_loss
@pytest.mark.parametrize("seed", range(3))
def test_on_policy_every_loss_has_the_policy_gradient(loss: Loss, seed: int) -> None:
    new_n, _, advantages_n = random_tokens(seed)
    part = loss(new_n, new_n.detach(), advantages_n)
    (grad_n,) = torch.autograd.grad(part.loss_n.sum(), new_n)
    assert torch.equal(grad_n, -advantages_n)
    assert not part.is_clipped_n.any()
    assert part.log_ratio_n.tolist() == [0.0] * 12


@each_loss
def test_no_tokens_cost_nothing_and_have_finite_gradients(loss: Loss) -> None:
    new_N = torch.tensor([0.1, -0.3], requires_grad=True)
    part = loss(new_N[:0], torch.zeros(0), torch.zeros(0))
    (grad_N,) = torch.autograd.grad(part.loss_n.sum(), new_N)
    assert len(part.loss_n) == len(part.is_clipped_n) == len(part.log_ratio_n) == 0
    assert grad_N.tolist() == [0.0, 0.0]


@each_loss
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_an_extreme_ratio_has_finite_loss_and_gradient(
    loss: Loss, advantage: float, log_ratio: float
) -> None:
    new_n = torch.tensor([log_ratio], requires_grad=True)
    part = loss(new_n, torch.zeros(1), torch.tensor([advantage]))
    (grad_n,) = torch.autograd.grad(part.loss_n.sum(), new_n)
    assert part.loss_n.isfinite().all()
    assert grad_n.isfinite().all()


@pytest.mark.parametrize("loss", [ppo, gspo])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("log_ratio", [61.0, 59.0, 0.0, -59.0, -61.0])
def test_clipped_tokens_are_those_without_gradient(
    loss: Loss, advantage: float, log_ratio: float
) -> None:
    new_n = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    part = loss(new_n, torch.zeros_like(new_n), new_n.new_tensor([advantage]))
    (grad_n,) = torch.autograd.grad(part.loss_n.sum(), new_n)
    assert part.is_clipped_n.item() == (grad_n.item() == 0.0 and advantage != 0.0)


@each_loss
@pytest.mark.parametrize("old", [-torch.inf, torch.inf, torch.nan])
def test_an_old_log_prob_that_is_not_finite_is_refused(loss: Loss, old: float) -> None:
    ones = torch.ones(2)
    with pytest.raises(UsageError, match="old log-prob is NaN or infinite"):
        loss(ones, torch.tensor([0.0, old]), ones)


def test_bad_arguments_are_refused() -> None:
    ones = torch.ones(2)
    with pytest.raises(UsageError, match="one value per scored token"):
        ppo(ones, ones[:1], ones)
    with pytest.raises(UsageError, match=r"clip_low in \[0, 1\]"):
        ppo_clip_loss(ones, ones, ones, clip_low=1.2, clip_high=0.2)
    with pytest.raises(UsageError, match=r"dual_clip=1\.0; choose a finite value above 1"):
        ppo_clip_loss(ones, ones, ones, **CLIPS, dual_clip=1.0)
