"""Three estimators of KL(policy || reference), one number per sampled token. Floor 1.

Called for the KL term of the loss, for the KL taken off the rewards, and for metrics. With
d = new - ref (log-probs of tokens drawn from the policy) and expectation E over those draws:

    estimator            E of the value     E of its gradient in the loss     in the reward
    k1 = d               KL                 0: nothing but noise              the true gradient
    k2 = d² / 2          biased             the true gradient of KL           wrong
    k3 = e^-d - 1 + d    KL, never < 0      that of KL(reference || policy)   wrong

"In the loss" the estimator itself is differentiated. "In the reward" it is a number taken off the
reward, and the policy gradient multiplies it by that of the log-prob: E[k ∇new].

Worked numbers, exact over three tokens: policy logits (0.5, -0.2, 0.1), reference log-probs
log_softmax(0, 0.3, -0.4). KL = 0.10285 with gradient (0.1058, -0.1767, 0.0709).

          value      gradient in the loss         gradient in the reward
    k1    0.10285    (0, 0, 0)                    (0.1058, -0.1767, 0.0709)
    k2    0.09361    (0.1058, -0.1767, 0.0709)    (-0.0178, 0.0297, -0.0119)
    k3    0.10285    (0.1304, -0.2178, 0.0874)    (-0.0246, 0.0411, -0.0165)

In the reward k2 and k3 push AWAY from the reference here. k1 or k3 multiplied by the differentiable
ratio exp(new - new.detach()) has the sum of both its gradients, which is the true one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from shardloop.config import KLEstimator


def kl_k1(new_n: Tensor, ref_n: Tensor) -> Tensor:
    """new - ref. As a value unbiased (0.10285), in a loss its expected gradient is 0."""
    return new_n - ref_n


def kl_k2(new_n: Tensor, ref_n: Tensor) -> Tensor:
    """(new - ref)² / 2. As a value biased (0.09361 for 0.10285), in a loss the true gradient."""
    return (new_n - ref_n).square() / 2


def kl_k3(new_n: Tensor, ref_n: Tensor) -> Tensor:
    """exp(ref - new) - 1 - (ref - new). Unbiased and never negative; GRPO's term.

    In a loss its gradient is the one of KL(reference || policy): near the true one while the two
    are close, (0.1304, -0.2178, 0.0874) against (0.1058, -0.1767, 0.0709) above.

    It is not held within a bound as the ratio of the clipped loss is, since it must go on pulling:
    where ref - new exceeds 88 in float32 (709 in float64) it is infinite, and so is the gradient.
    """
    log_ratio_n = ref_n - new_n
    return torch.expm1(log_ratio_n) - log_ratio_n


KL_ESTIMATORS: dict[KLEstimator, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
}
