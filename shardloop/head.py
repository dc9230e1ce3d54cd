"""The language model head fused with log-softmax, chunk by chunk: never an [n, V] tensor. Floor 2.

Called by the trainer for every log-prob it needs, with or without gradients. Only tokens that are
scored come in. The engine's sampler takes its temperature from here, so that both round alike.

    forward    hidden_cD ──▶ logits_cV ──▶ log-prob and entropy of each token; logits are dropped
    backward   hidden_cD ──▶ logits_cV ──▶ dlogits_cV in place ──▶ gradients of hidden and weight

Shapes: n scored tokens · c tokens of one chunk · V vocabulary · D width.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardloop.errors import UsageError

MIN_CHUNK = 256
"""Each chunk reads the weight and updates its gradient once; below this many tokens that traffic
costs more than the product."""
CHUNK_BYTES = 64 * 2**20
"""A chunk's logits take about this much, unless MIN_CHUNK of them take more."""


def token_logprobs(
    hidden_nD: Tensor,
    weight_VD: Tensor,
    target_ids_n: Tensor,
    *,
    temperature: float,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target under softmax(hidden @ weight.T / temperature), and its entropy.

    Extra memory is two chunks of logits, and in backward the gradients themselves. Backward
    computes the logits a second time instead of keeping them. The values do not depend on whether
    gradients are asked for, bit for bit; they depend on `chunk` by rounding only. Not twice
    differentiable.

    Args:
        hidden_nD, weight_VD: of one dtype. In bfloat16 the product is rounded to bfloat16;
            everything after it, and the sum of the weight's gradient over chunks, is in float32.
        target_ids_n: int64 in [0, V).
        chunk: tokens at a time; by default from the size of V, at least 256.
    Returns:
        (logprobs_n, entropy_n), float32, or float64 if the inputs are. The entropy carries no
        gradient: it is marked non-differentiable and serves as a metric. With n = 0 both are empty,
        and backward gives the weight a gradient of zeros (not None), so that ranks without tokens
        stay in step with the others.
    Raises:
        UsageError: shapes or dtypes that do not fit, V = 0, a chunk that is not above 0, a
            temperature that is not above 0 in the dtype of the result, a target outside [0, V).
    """
    _check(hidden_nD, weight_VD, target_ids_n, temperature=temperature)
    size = _default_chunk(weight_VD) if chunk is None else chunk
    if size < 1:
        raise UsageError(f"chunk={chunk}; choose 1 or more, or None")
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(
        hidden_nD, weight_VD, target_ids_n, temperature, size
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
    ) -> tuple[Tensor, Tensor]:
        logprobs_n = hidden_nD.new_empty(len(hidden_nD), dtype=_wide(hidden_nD.dtype))
        entropy_n = torch.empty_like(logprobs_n)
        for tokens in _chunks(len(hidden_nD), chunk):
            shifted_cV = _shifted_logits(hidden_nD[tokens], weight_VD, temperature)
            exp_cV = shifted_cV.exp()
            sum_c = exp_cV.sum(-1)
            log_sum_c = sum_c.log()
            logprobs_n[tokens] = (
                shifted_cV.gather(-1, target_ids_n[tokens, None]).squeeze(-1) - log_sum_c
            )
            entropy_n[tokens] = log_sum_c - shifted_cV.mul_(exp_cV).sum(-1) / sum_c
        ctx.save_for_backward(hidden_nD, weight_VD, target_ids_n)
        ctx.temperature = temperature
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy_n)
        return logprobs_n, entropy_n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_n: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_nD, weight_VD, target_ids_n = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden_nD = torch.empty_like(hidden_nD) if wants_hidden else None
        grad_weight_VD = (
            torch.zeros_like(weight_VD, dtype=_wide(weight_VD.dtype)) if wants_weight else None
        )
        for tokens in _chunks(len(hidden_nD), ctx.chunk):
            hidden_cD = hidden_nD[tokens]
            # d logprob / d logit = (onehot - softmax) / temperature, built in the logits' own
            # buffer
            dlogits_cV = _shifted_logits(hidden_cD, weight_VD, ctx.temperature).exp_()
            scale_c = grad_n[tokens] / ctx.temperature
            dlogits_cV.mul_((-scale_c / dlogits_cV.sum(-1))[:, None])
            dlogits_cV.scatter_add_(-1, target_ids_n[tokens, None], scale_c[:, None])
            if grad_hidden_nD is not None:
                grad_hidden_nD[tokens] = dlogits_cV.to(weight_VD.dtype) @ weight_VD
            if grad_weight_VD is not None:
                grad_weight_VD.addmm_(dlogits_cV.T, hidden_cD.to(dlogits_cV.dtype))
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_nD, grad_weight_VD, None, None, None


def _shifted_logits(hidden_cD: Tensor, weight_VD: Tensor, temperature: float) -> Tensor:
    """Tempered logits, so that exp cannot overflow, in float32 or float64."""
    logits_cV = torch.nn.functional.linear(hidden_cD, weight_VD).to(_wide(weight_VD.dtype))
    return temper_(logits_cV, logits_cV.new_tensor([temperature]))


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


def _default_chunk(weight_VD: Tensor) -> int:
    return max(MIN_CHUNK, CHUNK_BYTES // (len(weight_VD) * _wide(weight_VD.dtype).itemsize))


def _chunks(num_tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, num_tokens, chunk))


def _check(
    hidden_nD: Tensor,
    weight_VD: Tensor,
    target_ids_n: Tensor,
    *,
    temperature: float,
) -> None:
    if (
        hidden_nD.ndim != 2
        or weight_VD.ndim != 2
        or hidden_nD.shape[1] != weight_VD.shape[1]
        or target_ids_n.shape != hidden_nD.shape[:1]
        or not len(weight_VD)
    ):
        raise UsageError(
            f"hidden {tuple(hidden_nD.shape)}, weight {tuple(weight_VD.shape)} and targets "
            f"{tuple(target_ids_n.shape)} do not fit; pass [n, D], [V, D] with V > 0, and [n]"
        )
    if hidden_nD.dtype != weight_VD.dtype:
        raise UsageError(
            f"hidden is {hidden_nD.dtype} and weight is {weight_VD.dtype}; cast them to one dtype"
        )
    smallest = torch.finfo(_wide(hidden_nD.dtype)).tiny
    if not smallest <= temperature < float("inf"):
        raise UsageError(f"temperature={temperature}; choose a finite value above {smallest:.0e}")
    if len(target_ids_n):
        low, high = int(target_ids_n.min()), int(target_ids_n.max())
        if low < 0 or high >= len(weight_VD):
            raise UsageError(
                f"targets span {low}..{high}; token ids must be in [0, {len(weight_VD)})"
            )
