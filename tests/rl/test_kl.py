"""KL estimators, exactly: every expectation is a sum over the three tokens there are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardloop.rl.kl import KL_ESTIMATORS, kl_k1, kl_k2, kl_k3

LOGITS = (0.5, -0.2, 0.1)
REF = torch.tensor([0.0, 0.3, -0.4], dtype=torch.float64).log_softmax(0)
TRUE_KL = 0.10285
TRUE_GRAD = (0.1058, -0.1767, 0.0709)

Estimator = Callable[[Tensor, Tensor], Tensor]


def policy() -> tuple[Tensor, Tensor]:
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    return logits, logits.log_softmax(0)


def expected_gradient(estimator: Estimator, *, with_ratio: bool) -> list[float]:
    """Mean gradient of the estimator as a loss, over tokens drawn from the policy as it stands."""
    logits, new = policy()
    values = estimator(new, REF)
    if with_ratio:
        values = (new - new.detach()).exp() * values
    loss = (new.detach().exp() * values).sum()
    (grad,) = torch.autograd.grad(loss, logits)
    return grad.tolist()


def test_true_gradient_by_differentiating_the_exact_kl() -> None:
    logits, new = policy()
    kl = (new.exp() * (new - REF)).sum()
    (grad,) = torch.autograd.grad(kl, logits)
    assert kl.item() == pytest.approx(TRUE_KL, abs=5e-6)
    assert grad.tolist() == pytest.approx(TRUE_GRAD, abs=5e-5)


@pytest.mark.parametrize(
    ("estimator", "mean"), [(kl_k1, TRUE_KL), (kl_k2, 0.09361), (kl_k3, TRUE_KL)]
)
def test_expected_value(estimator: Estimator, mean: float) -> None:
    new = policy()[1].detach()
    assert (new.exp() * estimator(new, REF)).sum().item() == pytest.approx(mean, abs=5e-6)


@pytest.mark.parametrize(
    ("estimator", "with_ratio", "grad"),
    [
        (kl_k1, False, (0.0, 0.0, 0.0)),
        (kl_k2, False, TRUE_GRAD),
        (kl_k3, False, (0.1304, -0.2178, 0.0874)),
        (kl_k1, True, TRUE_GRAD),
        (kl_k3, True, TRUE_GRAD),
    ],
)
def test_expected_gradient_in_a_loss(
    estimator: Estimator, with_ratio: bool, grad: tuple[float, ...]
) -> None:
    assert expected_gradient(estimator, with_ratio=with_ratio) == pytest.approx(grad, abs=5e-5)


@pytest.mark.parametrize(
    ("estimator", "grad"),
    [
        (kl_k1, TRUE_GRAD),
        (kl_k2, (-0.0178, 0.0297, -0.0119)),
        (kl_k3, (-0.0246, 0.0411, -0.0165)),
    ],
)
@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_expected_gradient_in_a_reward(
    estimator: Estimator, grad: tuple[float, ...], baseline: float
) -> None:
    """The policy gradient of minus the estimator as reward; a baseline does not change it."""
    logits, new = policy()
    reward = -estimator(new, REF).detach()
    loss = (new.detach().exp() * -(reward - baseline) * new).sum()
    assert torch.autograd.grad(loss, logits)[0].tolist() == pytest.approx(grad, abs=5e-5)


def test_names_stand_for_their_estimators() -> None:
    assert {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3} == KL_ESTIMATORS


@pytest.mark.parametrize("estimator", [kl_k1, kl_k2, kl_k3])
def test_equal_policies_give_exactly_zero(estimator: Estimator) -> None:
    new_n = torch.tensor([-0.1, -3.0, -20.0])
    assert estimator(new_n, new_n).tolist() == [0.0, 0.0, 0.0]


def test_k3_is_never_negative_even_for_tiny_differences() -> None:
    new_n = torch.linspace(-1, 0, 1001)
    differences = torch.logspace(-8, 0, 1001)
    assert (kl_k3(new_n, new_n + differences) >= 0).all()
    assert (kl_k3(new_n, new_n - differences) >= 0).all()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 88.0), (torch.float64, 709.0)])
def test_k3_is_finite_up_to_its_bound_and_infinite_beyond(dtype: torch.dtype, bound: float) -> None:
    new_n = torch.tensor([-bound, -bound - 1.0], dtype=dtype, requires_grad=True)
    values_n = kl_k3(new_n, torch.zeros(2, dtype=dtype))
    (grad_n,) = torch.autograd.grad(values_n.sum(), new_n)
    assert values_n.isfinite().tolist() == grad_n.isfinite().tolist() == [True, False]
