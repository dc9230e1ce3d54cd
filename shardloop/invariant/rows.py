"""Row kernels: the result for a row is a function of that row alone, bit for bit. Floor 2.

Called by the layer that trainer and engine share, and by both heads.

Sums, products and quotients of single numbers are rounded in one way only, so whatever is written
in them is safe. Three things are not, and are met here:

    a product's order of addition   every library call has the shape [TILE, K] x [K, N]
    a sum over a row                 halves are added to each other (`row_sum`), no library sum
    exp, log, cos, sin               whole vectors only: a remainder would take another routine

Shapes: n rows · K and N width before and after a product · V vocabulary · D width of the model.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardloop.head import temper_, token_logprobs

TILE = 48
"""Rows of every product. Routines for AVX2 take six rows at a time and round a remainder of two in
another way; 48 rows have none, nor have the parts that 2, 4 or 8 threads take of them."""
LANES = 64
"""Elementwise functions get multiples of this many numbers: whole vectors of any machine."""
SERIAL = 16384
"""And at most so many at once, which torch does not divide over threads."""


class _GradientOf(torch.autograd.Function):
    """The value of `exact`, the gradient of `plain`: the same function, rounded in two ways."""

    @staticmethod
    def forward(
        ctx: Any, exact: Callable[..., Any], plain: Callable[..., Any], *inputs: Any
    ) -> Any:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [
            x.detach().requires_grad_(needs) if isinstance(x, Tensor) else x
            for x, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            outputs = ctx.plain(*inputs)
        wanted = [x for x, needs in zip(inputs, needed, strict=True) if needs]
        found = iter(torch.autograd.grad(outputs, wanted, grads))
        return None, None, *(next(found) if needs else None for needs in needed)


def with_gradient_of(plain: Callable[..., Any], exact: Callable[..., Any], *inputs: Any) -> Any:
    """`exact(*inputs)`; in backward the gradient of `plain(*inputs)`, computed again from inputs.

    Args:
        inputs: tensors or None. Not twice differentiable.
    """
    return _GradientOf.apply(exact, plain, *inputs)


def linear(x_nK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """x @ weight.T (+ bias): [n, N]."""
    result: Tensor = with_gradient_of(F.linear, _linear, x_nK, weight_NK, bias_N)
    return result


def _linear(x_nK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    num_rows = -(-len(x_nK) // TILE) * TILE
    padded = x_nK.new_zeros(num_rows, x_nK.shape[1])
    padded[: len(x_nK)] = x_nK
    out = x_nK.new_empty(num_rows, len(weight_NK))
    for tile, into in zip(padded.split(TILE), out.split(TILE), strict=True):
        torch.mm(tile, weight_NK.T, out=into)
    out = out[: len(x_nK)]
    return out if bias_N is None else out.add_(bias_N)


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dim, by adding its second half to its first until one number is left."""
    width = 1 << (x.shape[-1] - 1).bit_length()
    x = F.pad(x, (0, width - x.shape[-1]))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def elementwise(fn: Callable[..., Tensor], x: Tensor) -> Tensor:
    """fn(x), for one of torch's elementwise functions with an `out`; no gradient."""
    flat = x.new_zeros(-(-x.numel() // LANES) * LANES)
    flat[: x.numel()] = x.reshape(-1)
    for part in flat.split(SERIAL):
        fn(part, out=part)
    return flat[: x.numel()].view(x.shape)


def rms_norm(x: Tensor, weight_D: Tensor, *, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dim."""

    def plain(x: Tensor, weight_D: Tensor) -> Tensor:
        return weight_D * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    def exact(x: Tensor, weight_D: Tensor) -> Tensor:
        rms = (row_sum(x * x) / x.shape[-1] + eps).sqrt()
        return weight_D * (x / rms[..., None])

    result: Tensor = with_gradient_of(plain, exact, x, weight_D)
    return result


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""

    def plain(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def exact(gate: Tensor, up: Tensor) -> Tensor:
        return gate / (elementwise(torch.exp, -gate) + 1) * up

    result: Tensor = with_gradient_of(plain, exact, gate, up)
    return result


def exact_logprobs(
    logits_nV: Tensor, ids_n: Tensor, temperature_n: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-prob of ids_n, entropy) under softmax(logits / temperature), both [n]; no gradient.

    Args:
        temperature_n: one for each row, or [1] for all.
    """
    temperature_n = temperature_n.expand(len(logits_nV))
    logprobs_n = logits_nV.new_empty(len(logits_nV))
    entropy_n = torch.empty_like(logprobs_n)
    for rows in torch.arange(len(logits_nV), device=logits_nV.device).split(TILE):
        shifted_nV = temper_(logits_nV[rows].clone(), temperature_n[rows])
        exp_nV = elementwise(torch.exp, shifted_nV)
        sum_n = row_sum(exp_nV)
        log_sum_n = elementwise(torch.log, sum_n)
        logprobs_n[rows] = shifted_nV.gather(1, ids_n[rows, None])[:, 0] - log_sum_n
        entropy_n[rows] = log_sum_n - row_sum(shifted_nV * exp_nV) / sum_n
    return logprobs_n, entropy_n


def score(
    hidden_nD: Tensor, weight_VD: Tensor, ids_n: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """`head.token_logprobs`, row by row the same as `exact_logprobs` of `linear`'s logits."""

    def plain(hidden_nD: Tensor, weight_VD: Tensor, ids_n: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden_nD, weight_VD, ids_n, temperature=temperature)

    def exact(hidden_nD: Tensor, weight_VD: Tensor, ids_n: Tensor) -> tuple[Tensor, Tensor]:
        temperature_1 = hidden_nD.new_tensor([temperature])
        parts = [
            exact_logprobs(_linear(hidden_cD, weight_VD, None), ids_c, temperature_1)
            for hidden_cD, ids_c in zip(hidden_nD.split(TILE), ids_n.split(TILE), strict=True)
        ]
        logprobs, entropy = zip(*parts, strict=True)
        return torch.cat(logprobs), torch.cat(entropy)

    result: tuple[Tensor, Tensor] = with_gradient_of(plain, exact, hidden_nD, weight_VD, ids_n)
    return result
