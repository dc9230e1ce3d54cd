"""Importance weights for tokens that another program sampled, held in bounds. Floor 1.

The engine samples with its own kernels and precision, perhaps with older weights: its log-prob of a
token (`engine`) differs from the trainer's (`old`). The weight exp(old - engine), truncated or
masked and multiplied into the loss, corrects the mean for that. Called by the loop on the whole
batch.

Shapes: B rows · N tokens of all rows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shardloop.config import CorrectionKind, CorrectionMode
from shardloop.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Correction:
    weights_N: Tensor
    """Constants of at most `cap` on the loss tokens, 0 elsewhere."""
    ess: float
    """Effective share of samples, (Σw)² / (k Σw²), over the k tokens ("token", "none") or rows
    ("sequence", "geometric") that have a weight; 1 when all weights are equal, 0 when all are
    masked out."""
    cut_fraction: float
    """Share of those k weights that were cut to the cap, or masked out."""
    gap_mean: float
    """Mean |old - engine| over the loss tokens."""
    gap_max: float


def correction_weights(
    old_N: Tensor,
    engine_N: Tensor,
    *,
    kind: CorrectionKind,
    mode: CorrectionMode,
    cap: float,
    floor: float,
    mask_N: Tensor,
    offsets: Tensor,
) -> Correction:
    """w = exp(log-ratio) on every loss token, where the log-ratio is, for d = old - engine,

        "token"       d of the token itself
        "sequence"    Σ d over the row's loss tokens: the PRODUCT of its ratios
        "geometric"   mean of d over them: the geometric MEAN of its ratios
        "none"        0: every weight is 1

    A row of 200 tokens, each 0.01 apart: 7.389 as product, 1.0101 as geometric mean. The product is
    the exact weight of a sequence, but its spread grows with length; the mean is biased.

    A weight that is out of bounds is, by `mode`,

        "truncate"    min(w, cap)
        "mask"        0 outside [floor, cap], untouched inside

    With cap 2 and floor 0.5, ratios (0.3, 0.8, 5) become (0.3, 0.8, 2) or (0, 0.8, 0). What is
    masked out still counts in the loss's denominators, as what is truncated does: the other tokens
    keep the weight they had.

    `engine_N` are the engine's log-probs under its full distribution (`Batch.full_N`). They make
    the ratio 1 wherever both programs agree, whatever top-p or top-k cut off: the weight corrects
    for kernels, precision and stale weights alone. Those under the distribution sampled from
    (`Batch.behave_N`) would not: top-p 0.8 on (.5, .3, .15, .05) keeps two tokens and divides by
    0.8, hence 0.8 per token with nothing to correct, and 0.8^100 = 2.0e-10 for a row of 100.

    Args:
        old_N, engine_N: float [N], natural log-probs at one temperature; no gradient flows.
        cap: 1 or more.
        floor: "mask" only, in [0, 1]; 0 for "truncate".
        mask_N: bool [N], the loss tokens. Values elsewhere do not matter.
        offsets: int64 [B + 1], as in `Batch`.
    Raises:
        UsageError: an unknown kind or mode, a cap or floor out of range, shapes that differ, a
            log-prob at a loss token that is NaN or infinite.
    """
    _check(old_N, engine_N, mask_N, kind=kind, mode=mode, cap=cap, floor=floor)
    gap_n = (old_N.detach() - engine_N.detach())[mask_N]
    if not bool(gap_n.isfinite().all()):
        raise UsageError("a log-prob at a loss token is NaN or infinite; check the engine's output")
    rows_B = torch.arange(len(offsets) - 1, device=offsets.device)
    row_n = rows_B.repeat_interleave(offsets.diff())[mask_N]
    log_ratios, index_n = _log_ratios(gap_n, row_n, kind=kind)
    is_cut = log_ratios > math.log(cap)
    if mode == "mask":
        is_cut |= log_ratios < (math.log(floor) if floor else -math.inf)
        log_weights = log_ratios.masked_fill(is_cut, -math.inf)
    else:
        log_weights = log_ratios.clamp(max=math.log(cap))
    weights_N = torch.zeros_like(old_N, requires_grad=False)
    weights_N[mask_N] = log_weights.exp().clamp(max=cap)[index_n]
    return Correction(
        weights_N=weights_N,
        ess=_effective_share(log_weights),
        cut_fraction=_mean(is_cut.double()),
        gap_mean=_mean(gap_n.abs()),
        gap_max=float(gap_n.abs().max()) if len(gap_n) else 0.0,
    )


def _check(
    old_N: Tensor,
    engine_N: Tensor,
    mask_N: Tensor,
    *,
    kind: CorrectionKind,
    mode: CorrectionMode,
    cap: float,
    floor: float,
) -> None:
    if kind not in ("none", "token", "sequence", "geometric"):
        raise UsageError(f"kind={kind!r}; choose none, token, sequence or geometric")
    if mode not in ("truncate", "mask"):
        raise UsageError(f"mode={mode!r}; choose truncate or mask")
    if not cap >= 1.0:
        raise UsageError(f"cap={cap}; choose 1 or more (infinity for no cap)")
    if not 0.0 <= floor <= (1.0 if mode == "mask" else 0.0):
        raise UsageError(f"floor={floor}; choose 0 to 1 with mode mask, 0 with truncate")
    if not old_N.shape == engine_N.shape == mask_N.shape:
        shapes = [tuple(tensor.shape) for tensor in (old_N, engine_N, mask_N)]
        raise UsageError(f"old, engine and mask have shapes {shapes}; each needs one value a token")


def _log_ratios(gap_n: Tensor, row_n: Tensor, *, kind: CorrectionKind) -> tuple[Tensor, Tensor]:
    """The distinct log-ratios (k of them), and which of them each of the n loss tokens takes."""
    if kind in ("none", "token"):
        each_n = torch.arange(len(gap_n), device=gap_n.device)
        return gap_n if kind == "token" else torch.zeros_like(gap_n), each_n
    num_tokens_B = row_n.bincount()
    has_tokens_B = num_tokens_B > 0
    index_n = (has_tokens_B.cumsum(0) - 1)[row_n]
    num_tokens_k = num_tokens_B[has_tokens_B]
    sums_k = gap_n.new_zeros(len(num_tokens_k)).index_add(0, index_n, gap_n)
    return sums_k if kind == "sequence" else sums_k / num_tokens_k, index_n


def _effective_share(log_weights: Tensor) -> float:
    """From logs, with the largest scaled to 1: products too small for a float still count."""
    if not len(log_weights):
        return 1.0
    if log_weights.max() == -math.inf:
        return 0.0
    scaled = (log_weights.double() - log_weights.max()).exp()
    return float(scaled.sum().square() / (len(scaled) * scaled.square().sum()))


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0
