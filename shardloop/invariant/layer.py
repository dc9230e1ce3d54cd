"""One decoder layer of batch-invariant kernels, over flat tokens. Floor 2.

Called by the trainer's policy and the engine's decoder, which differ in where weights and keys are
and in nothing else.

Shapes: n tokens of any sequences, D width, H query heads, K kv heads, E head_dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardloop.invariant.rows import elementwise, linear, rms_norm, swiglu
from shardloop.model.rope import rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_nHE, k_nKE, v_nKE) -> attention of the new tokens, [n, H, E]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x_nK: Tensor) -> Tensor:
        return linear(x_nK, self.weight, self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """The weights of one layer as separate tensors, however they are stored."""

    q: Projection
    k: Projection
    v: Projection
    o: Projection
    gate: Projection
    up: Projection
    down: Projection
    input_norm: Tensor
    post_attention_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


def run_layer(
    x_nD: Tensor,
    weights: LayerWeights,
    *,
    head_dim: int,
    eps: float,
    cos_sin: Tensor,
    attend: Attend,
) -> Tensor:
    """x after attention and MLP, both residual: [n, D]; `cos_sin` is what `rope_of` gives."""
    h_nD = rms_norm(x_nD, weights.input_norm, eps=eps)
    q_nHE, k_nKE, v_nKE = (
        project(h_nD).unflatten(-1, (-1, head_dim)) for project in (weights.q, weights.k, weights.v)
    )
    if weights.q_norm is not None and weights.k_norm is not None:
        q_nHE = rms_norm(q_nHE, weights.q_norm, eps=eps)
        k_nKE = rms_norm(k_nKE, weights.k_norm, eps=eps)
    out_nHE = attend(rotate(q_nHE, cos_sin), rotate(k_nKE, cos_sin), v_nKE)
    x_nD = x_nD + weights.o(out_nHE.flatten(-2))
    h_nD = rms_norm(x_nD, weights.post_attention_norm, eps=eps)
    return x_nD + weights.down(swiglu(weights.gate(h_nD), weights.up(h_nD)))


def rope_of(positions_n: Tensor, frequencies: Tensor, *, dtype: torch.dtype) -> Tensor:
    """cos and sin of each token's angles, in float32 as in `model.rope`: [2, n, 1, E / 2]."""
    angles = positions_n.to(torch.float32)[:, None, None] * frequencies
    return torch.stack([elementwise(fn, angles) for fn in (torch.cos, torch.sin)]).to(dtype)
