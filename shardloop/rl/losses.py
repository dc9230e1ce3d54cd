"""The clipped policy loss. Floor 1; called by the trainer on the scored tokens of a micro-batch.

Shape: n tokens under the loss mask; masked tokens are never passed in, so they cannot matter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardloop.errors import UsageError

MAX_LOG_RATIO = 60.0
"""new - old is held within this, where exp is finite in float32; beyond it the gradient is 0."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """Scalars that add up: the sum over micro-batches and ranks is the mean over all tokens."""

    loss: Tensor
    """Differentiable with respect to `new_n`."""
    clip_fraction: Tensor
    """Share of tokens whose gradient was cut off, by the clip or by `MAX_LOG_RATIO`. Detached, like
    all below."""
    approx_kl: Tensor
    """ratio - 1 - log(ratio): estimates KL(old || new), never negative."""
    ratio: Tensor
    """Mean ratio; 1 before the first update."""


def ppo_clip_loss(
    new_n: Tensor,
    old_n: Tensor,
    advantages_n: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float,
    weights_n: Tensor | None = None,
) -> PolicyLoss:
    """-Σ min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) w / denominator, r = exp(new - old).

    With clips of 0.2: A = +1, r = 2 costs -1.2 (no gradient); A = -1, r = 10 costs 10 (not clipped:
    there is no second clip); A = -1, r = 0.5 costs 0.8; A = +1, r = 0.5 costs -0.5.

    Args:
        new_n: log-probs with gradient.
        old_n: log-probs by the trainer before the first update on this batch; never the engine's.
        advantages_n, weights_n: one per token; weights are constants (`shardloop.rl.correction`).
        denominator: the loss tokens of the WHOLE batch over all ranks and micro-batches (or another
            count of the whole batch, such as its rows). The sum of the parts then does not depend
            on how the batch was split.
    Returns:
        PolicyLoss. With n = 0 all parts are 0, and backward works and gives zeros.
    Raises:
        UsageError: shapes that differ, an old log-prob that is NaN or infinite, a clip outside its
            range, tokens with a denominator that is not above 0.
    """
    _check(new_n, old_n, advantages_n, weights_n, denominator=denominator)
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise UsageError(
            f"clip_low={clip_low}, clip_high={clip_high}; choose clip_low in [0, 1], clip_high >= 0"
        )
    free_log_ratio_n = new_n - old_n.detach()
    log_ratio_n = free_log_ratio_n.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_n = log_ratio_n.exp()
    free_n = ratio_n * advantages_n
    clipped_n = ratio_n.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_n
    objective_n = torch.minimum(free_n, clipped_n)
    if weights_n is not None:
        objective_n = objective_n * weights_n.detach()
    scale = denominator or 1.0
    with torch.no_grad():
        is_held_n = (free_log_ratio_n.abs() > MAX_LOG_RATIO) & (advantages_n != 0)
        is_clipped_n = ((clipped_n < free_n) | is_held_n).to(new_n.dtype)
        approx_kl_n = torch.expm1(log_ratio_n) - log_ratio_n
    return PolicyLoss(
        loss=-objective_n.sum() / scale,
        clip_fraction=is_clipped_n.sum() / scale,
        approx_kl=approx_kl_n.sum() / scale,
        ratio=ratio_n.detach().sum() / scale,
    )


def _check(
    new_n: Tensor,
    old_n: Tensor,
    advantages_n: Tensor,
    weights_n: Tensor | None,
    *,
    denominator: float,
) -> None:
    others = [old_n, advantages_n] + ([] if weights_n is None else [weights_n])
    if new_n.ndim != 1 or any(other.shape != new_n.shape for other in others):
        shapes = [tuple(tensor.shape) for tensor in (new_n, *others)]
        raise UsageError(f"shapes {shapes} differ; pass one value per scored token in each, [n]")
    if not bool(old_n.isfinite().all()):
        raise UsageError("an old log-prob is NaN or infinite; the policy that gave it has diverged")
    if len(new_n) and not 0.0 < denominator < float("inf"):
        raise UsageError(
            f"denominator={denominator} with {len(new_n)} tokens; "
            "pass the number of loss tokens of the whole batch"
        )
