"""Policy losses: one value for each scored token. Floor 1; called by `shardloop.objective`.

All three compare `new` (with gradient) to `old`, the trainer's log-probs before the first update on
the batch, and weigh the token's advantage A by a ratio held near 1:

    ppo     each token's own ratio; beyond the clip the token has no gradient
    gspo    the geometric mean of the row's ratios, so that a row is clipped as a whole
    cispo   each token's own ratio, clipped, as a constant weight: no token loses its gradient

Sums, denominators (`shardloop.rl.aggregation`) and correction weights are the objective's.

Shape: n tokens under the loss mask; masked tokens are never passed in, so they cannot matter.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardloop.errors import UsageError

MAX_LOG_RATIO = 60.0
"""new - old is held within this, where exp is finite in float32; beyond it ppo and gspo give no
gradient."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLoss:
    """One value per token, all [n]."""

    loss_n: Tensor
    """Differentiable with respect to `new_n`."""
    is_clipped_n: Tensor
    """bool: the clip acts on this token (ppo, gspo: its gradient is cut off, by the clip or by
    `MAX_LOG_RATIO`; cispo: its weight is not its ratio)."""
    log_ratio_n: Tensor
    """new - old of the token itself, held within `MAX_LOG_RATIO`; detached."""


def ppo_clip_loss(
    new_n: Tensor,
    old_n: Tensor,
    advantages_n: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(new - old).

    With a dual clip c, a token of A < 0 costs at most c |A|; it does nothing where A > 0. With
    clips of 0.2:

        A = +1, r = 2      -1.2, no gradient
        A = +1, r = 0.5    -0.5
        A = -1, r = 0.5     0.8, no gradient
        A = -1, r = 10      10, and with c = 3: 3, no gradient

    Sources: Schulman et al. 2017 (the clip), Ye et al. 2020 (dual clip), DAPO, Yu et al. 2025 (a
    clip for each side).

    Args:
        new_n: log-probs with gradient.
        old_n: log-probs by the trainer before the first update on this batch; never the engine's.
        dual_clip: above 1, or None for no second bound.
    Raises:
        UsageError: shapes that differ, an old log-prob that is NaN or infinite, a clip outside its
            range.
    """
    _check(new_n, old_n, advantages_n, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None and not 1.0 < dual_clip < float("inf"):
        raise UsageError(f"dual_clip={dual_clip}; choose a finite value above 1, or None")
    loss_n, is_clipped_n = _clipped_loss(
        new_n - old_n.detach(), advantages_n, low=1.0 - clip_low, high=1.0 + clip_high
    )
    if dual_clip is not None:
        most_n = torch.where(advantages_n < 0, -dual_clip * advantages_n, torch.inf)
        is_clipped_n = is_clipped_n | (loss_n.detach() > most_n)
        loss_n = torch.where(loss_n > most_n, most_n, loss_n)
    return TokenLoss(
        loss_n=loss_n, is_clipped_n=is_clipped_n, log_ratio_n=_log_ratio(new_n, old_n).detach()
    )


def gspo_loss(
    new_n: Tensor,
    old_n: Tensor,
    advantages_n: Tensor,
    *,
    row_n: Tensor,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """The clipped loss with the row's ratio s = exp(mean of new - old over its tokens) for r.

    The token's form is s(t) = sg[s] exp(new_t - sg[new_t]): its value is s on each token of the
    row, its gradient reaches each token's own log-prob. Averaged over rows (sequence-mean) it is
    the loss of Zheng et al. 2025. Clips are far narrower than PPO's there (0.0003 and 0.0004).

    A row of two tokens with new - old = (0.6, -0.2), A = +1: s = exp(0.2) = 1.2214 on both (the
    product would be 1.4918). With clips of 0.2 both cost -1.2 without gradient, though the second
    token's own ratio 0.8187 is within the clip; with clips of 0.3 both cost -1.2214, and that is
    also the gradient of each.

    Args:
        row_n: int64, which row each token is of. Rows are whole: a micro-batch never cuts one.
    Raises:
        UsageError: as `ppo_clip_loss`.
    """
    _check(new_n, old_n, advantages_n, clip_low=clip_low, clip_high=clip_high)
    log_ratio_n = _log_ratio(new_n, old_n).detach()
    free_log_ratio_n = _row_means((new_n - old_n).detach(), row_n) + (new_n - new_n.detach())
    loss_n, is_clipped_n = _clipped_loss(
        free_log_ratio_n, advantages_n, low=1.0 - clip_low, high=1.0 + clip_high
    )
    return TokenLoss(loss_n=loss_n, is_clipped_n=is_clipped_n, log_ratio_n=log_ratio_n)


def cispo_loss(
    new_n: Tensor, old_n: Tensor, advantages_n: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A new: the clipped ratio is a constant weight.

    A = +1, old = log 0.25, new = log 0.5 (r = 2), clips of 0.2: the loss is -1.2 log 0.5 = 0.8318
    and its gradient -1.2, where PPO's is 0. The value itself means nothing; its gradient does.

    Source: MiniMax-M1 (2025), which leaves the lower side open (clip_low = 1).

    Raises:
        UsageError: as `ppo_clip_loss`.
    """
    _check(new_n, old_n, advantages_n, clip_low=clip_low, clip_high=clip_high)
    log_ratio_n = _log_ratio(new_n, old_n).detach()
    ratio_n = log_ratio_n.exp()
    weights_n = ratio_n.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(
        loss_n=-weights_n * advantages_n * new_n,
        is_clipped_n=(weights_n != ratio_n) & (advantages_n != 0),
        log_ratio_n=log_ratio_n,
    )


def _log_ratio(new_n: Tensor, old_n: Tensor) -> Tensor:
    return (new_n - old_n.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped_loss(
    free_log_ratio_n: Tensor, advantages_n: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, low, high) A), and where its gradient is cut off."""
    ratio_n = free_log_ratio_n.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    free_n = ratio_n * advantages_n
    clipped_n = ratio_n.clamp(low, high) * advantages_n
    is_held_n = (free_log_ratio_n.detach().abs() > MAX_LOG_RATIO) & (advantages_n != 0)
    return -torch.minimum(free_n, clipped_n), (clipped_n < free_n).detach() | is_held_n


def _row_means(values_n: Tensor, row_n: Tensor) -> Tensor:
    """Mean over the tokens of each token's row, [n]."""
    if not len(values_n):
        return values_n
    _, place_n, counts_B = row_n.unique(return_inverse=True, return_counts=True)
    sums_B = values_n.new_zeros(len(counts_B)).index_add(0, place_n, values_n)
    return (sums_B / counts_B)[place_n]


def _check(
    new_n: Tensor, old_n: Tensor, advantages_n: Tensor, *, clip_low: float, clip_high: float
) -> None:
    if new_n.ndim != 1 or not new_n.shape == old_n.shape == advantages_n.shape:
        shapes = [tuple(tensor.shape) for tensor in (new_n, old_n, advantages_n)]
        raise UsageError(f"shapes {shapes} differ; pass one value per scored token in each, [n]")
    if not bool(old_n.isfinite().all()):
        raise UsageError("an old log-prob is NaN or infinite; the policy that gave it has diverged")
    if not (0.0 <= clip_low <= 1.0 and clip_high >= 0.0):
        raise UsageError(
            f"clip_low={clip_low}, clip_high={clip_high}; choose clip_low in [0, 1], clip_high >= 0"
        )
