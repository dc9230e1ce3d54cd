"""The language model head fused with log-softmax, tile by tile: never an [n, V] tensor. Floor 2.

Called by the trainer for every log-prob it needs, with or without gradients. Only tokens that are
scored come in. The engine's sampler takes its temperature from here, so that both round alike.

    forward    hidden_cD ──▶ logits_cv ──▶ running maximum and sums; the logits are dropped
    backward   hidden_cD ──▶ logits_cv ──▶ dlogits_cv in place ──▶ gradients of hidden and weight

The vocabulary may be cut by rows over ranks; then each rank walks the tiles of its own rows, and
the sums, and in backward the gradient of hidden, are added up over the ranks.

Shapes: n scored tokens · V vocabulary, or this rank's rows of it · D width · c tokens and v rows of
one tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardloop.errors import UsageError
from shardloop.model.tensor_parallel import SingleProcess, TensorParallel
from shardloop.running_softmax import RunningSoftmax, shifted_

CHUNK = 512
"""Tokens of a tile: this many share each read of the weight and each update of its gradient."""
TILE = 2**20
"""Logits of a tile: few enough to stay in a cache while they are walked several times. TILE / CHUNK
rows of the weight share each update of the gradient of hidden."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabShard:
    """This rank's rows of a head whose vocabulary is cut over the ranks of `tp`.

    The ranks' rows together are the vocabulary, each id once; a rank may have none.
    """

    tp: TensorParallel
    first_id: int
    """The token id of the rank's first row; the others follow."""
    vocab_size: int
    """Of all ranks together."""


def token_logprobs(
    hidden_nD: Tensor,
    weight_VD: Tensor,
    target_ids_n: Tensor,
    *,
    temperature: float,
    chunk: int | None = None,
    vocab: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under softmax(hidden @ weight.T / temperature), and its entropy.

    Extra memory is two tiles of logits, three where the entropy has a gradient, and in backward the
    gradients themselves. Backward computes the logits a second time instead of keeping them. The
    values do not depend on whether gradients are asked for, bit for bit; they depend on `chunk` by
    rounding only. Not twice differentiable.

    With `vocab`, collective over `vocab.tp`, forward and backward: all ranks call with the same
    arguments but for the weight, and with the same gradients of the results. All get the same bits
    and the whole gradient of hidden; the gradient of the weight is that of the rank's own rows.

    Args:
        hidden_nD, weight_VD: of one dtype. In bfloat16 the logits are rounded to bfloat16;
            everything after them, and the sums of both gradients, are in float32.
        target_ids_n: int64 in [0, vocabulary).
        chunk: tokens of a tile, CHUNK by default.
        vocab: which rows `weight_VD` holds; by default all of them.
    Returns:
        (logprobs_n, entropy_n), float32, or float64 if the inputs are; both differentiable. With
        n = 0 both are empty, and backward gives the weight a gradient of zeros (not None), so that
        ranks without tokens stay in step with the others.
    Raises:
        UsageError: shapes or dtypes that do not fit, no vocabulary, rows outside of it, a chunk
            that is not above 0, a temperature that is not above 0 in the dtype of the result, a
            target outside the vocabulary.
    """
    if vocab is None:
        vocab = VocabShard(tp=SingleProcess(), first_id=0, vocab_size=len(weight_VD))
    _check(hidden_nD, weight_VD, target_ids_n, temperature=temperature, vocab=vocab)
    size = CHUNK if chunk is None else chunk
    if size < 1:
        raise UsageError(f"chunk={chunk}; choose 1 or more, or None")
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden_nD, weight_VD, target_ids_n, temperature, size, vocab
    )
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_nD: Tensor,
        weight_VD: Tensor,
        target_ids_n: Tensor,
        temperature: float,
        chunk: int,
        vocab: VocabShard,
    ) -> tuple[Tensor, Tensor]:
        like_n = hidden_nD.new_empty(len(hidden_nD), dtype=_wide(hidden_nD.dtype))
        softmax = RunningSoftmax(like_n, temperature=temperature)
        for tokens, rows in _tiles(len(hidden_nD), len(weight_VD), chunk):
            target_c, is_here_c = _within(rows, target_ids_n[tokens] - vocab.first_id)
            logits_cv = _logits(hidden_nD[tokens], weight_VD[rows])
            softmax.add(tokens, logits_cv, target_c=target_c, is_here_c=is_here_c)
        softmax.merge(vocab.tp)
        ctx.save_for_backward(
            hidden_nD,
            weight_VD,
            target_ids_n,
            softmax.max_n,
            softmax.sum_n,
            softmax.mean_shifted_n(),
        )
        ctx.temperature, ctx.chunk, ctx.vocab = temperature, chunk, vocab
        ctx.set_materialize_grads(False)
        return softmax.logprobs_and_entropy()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_n: Tensor | None, grad_entropy_n: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_nD, weight_VD, target_ids_n, max_n, sum_n, mean_n = ctx.saved_tensors
        wide, scale = sum_n.dtype, -1.0 / ctx.temperature
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden_nD = torch.zeros_like(hidden_nD, dtype=wide) if wants_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if wants_weight else None
        grad_n = torch.zeros_like(sum_n) if grad_n is None else grad_n
        offset_n, slope_n = grad_n / sum_n, None
        if grad_entropy_n is not None and grad_entropy_n.any():
            slope_n = grad_entropy_n / sum_n
            offset_n -= slope_n * mean_n
        for tokens, rows in _tiles(len(hidden_nD), len(weight_VD), ctx.chunk):
            hidden_cD, weight_vD = hidden_nD[tokens], weight_VD[rows]
            shifted_cv = shifted_(
                _logits(hidden_cD, weight_vD), max_n[tokens], temperature=ctx.temperature
            )
            dlogits_cv = _exp_times_line(
                shifted_cv, offset_n[tokens], None if slope_n is None else slope_n[tokens]
            )
            target_c, is_here_c = _within(rows, target_ids_n[tokens] - ctx.vocab.first_id)
            dlogits_cv.scatter_add_(-1, target_c[:, None], -(grad_n[tokens] * is_here_c)[:, None])
            # So far this is d/dlogits of -temperature times the loss; `scale` does the rest.
            if grad_hidden_nD is not None:
                grad_hidden_nD[tokens].addmm_(dlogits_cv, weight_vD.to(wide), alpha=scale)
            if grad_weight_VD is not None:
                grad_weight_VD[rows].addmm_(dlogits_cv.T, hidden_cD.to(wide), alpha=scale)
        if grad_hidden_nD is not None:
            grad_hidden_nD = ctx.vocab.tp.all_reduce(grad_hidden_nD).to(hidden_nD.dtype)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_nD, grad_weight_VD, None, None, None, None


def _exp_times_line(shifted_cv: Tensor, offset_c: Tensor, slope_c: Tensor | None) -> Tensor:
    """exp(s) (offset + slope s), overwriting `shifted_cv`.

    With p = exp(s) / sum and m = the mean of s, d logprob / d logit_j = (onehot_j - p_j) / T and
    d entropy / d logit_j = -p_j (log p_j + entropy) / T = -p_j (s_j - m) / T.
    """
    if slope_c is None:
        return shifted_cv.exp_().mul_(offset_c[:, None])
    exp_cv = shifted_cv.exp()
    return exp_cv.mul_(shifted_cv.mul_(slope_c[:, None]).add_(offset_c[:, None]))


def _logits(hidden_cD: Tensor, weight_vD: Tensor) -> Tensor:
    return torch.nn.functional.linear(hidden_cD, weight_vD).to(_wide(weight_vD.dtype))


def _tiles(num_tokens: int, num_rows: int, chunk: int) -> Iterator[tuple[slice, slice]]:
    """(tokens, rows of the weight); all tokens before the next rows, which stay in the cache."""
    height = max(1, TILE // chunk)
    for row in range(0, num_rows, height):
        for token in range(0, num_tokens, chunk):
            yield slice(token, token + chunk), slice(row, min(row + height, num_rows))


def _within(rows: slice, local_ids_c: Tensor) -> tuple[Tensor, Tensor]:
    """Places of ids relative to `rows`, clamped into it, and whether they were within."""
    place_c = local_ids_c - rows.start
    is_here_c = (place_c >= 0) & (place_c < rows.stop - rows.start)
    return place_c.masked_fill(~is_here_c, 0), is_here_c


def temper_(logits_nV: Tensor, temperature_n: Tensor) -> Tensor:
    """In place: logits minus their row's maximum, then over the row's temperature (one, or [n]).

    In this order, since dividing first would enlarge what the logits have in common, and with it
    the rounding of their differences. The largest becomes exactly 0, at any temperature: one that
    is too small for the dtype counts as its smallest normal number.
    """
    smallest = torch.finfo(logits_nV.dtype).tiny
    temperature_n1 = temperature_n.to(logits_nV.dtype).clamp(min=smallest)[:, None]
    return logits_nV.sub_(logits_nV.amax(-1, keepdim=True)).div_(temperature_n1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _check(
    hidden_nD: Tensor,
    weight_VD: Tensor,
    target_ids_n: Tensor,
    *,
    temperature: float,
    vocab: VocabShard,
) -> None:
    if (
        hidden_nD.ndim != 2
        or weight_VD.ndim != 2
        or hidden_nD.shape[1] != weight_VD.shape[1]
        or target_ids_n.shape != hidden_nD.shape[:1]
        or vocab.vocab_size < 1
    ):
        raise UsageError(
            f"hidden {tuple(hidden_nD.shape)}, weight {tuple(weight_VD.shape)} and targets "
            f"{tuple(target_ids_n.shape)} do not fit; pass [n, D], [V, D] with V > 0, and [n]"
        )
    if hidden_nD.dtype != weight_VD.dtype:
        raise UsageError(
            f"hidden is {hidden_nD.dtype} and weight is {weight_VD.dtype}; cast them to one dtype"
        )
    if vocab.first_id < 0 or vocab.first_id + len(weight_VD) > vocab.vocab_size:
        raise UsageError(
            f"{len(weight_VD)} rows from id {vocab.first_id} do not lie in a vocabulary of "
            f"{vocab.vocab_size}; pass a rank's own rows, without padding"
        )
    smallest = torch.finfo(_wide(hidden_nD.dtype)).tiny
    if not smallest <= temperature < float("inf"):
        raise UsageError(f"temperature={temperature}; choose a finite value above {smallest:.0e}")
    if len(target_ids_n):
        low, high = int(target_ids_n.min()), int(target_ids_n.max())
        if low < 0 or high >= vocab.vocab_size:
            raise UsageError(
                f"targets span {low}..{high}; token ids must be in [0, {vocab.vocab_size})"
            )
