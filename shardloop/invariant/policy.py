"""The trainer's policy on batch-invariant kernels, over a transformers model's weights. Floor 2.

Called by the trainer in place of `Policy`. Modules, names and what FSDP gathers stay as they are;
only what a layer computes is replaced.

    packed rows [B, T] ──real tokens only──▶ [n] ──layers──▶ hidden ──▶ scored tokens
                                              │ attention: [S, T] of whole sequences and back

Shapes: B rows, T tokens of a row or of the longest sequence, n tokens that are not padding,
S sequences, D width, H query heads, K kv heads, E head_dim, m scored tokens.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardloop.invariant.attention import attention
from shardloop.invariant.check import check_invariance
from shardloop.invariant.layer import LayerWeights, Projection, rope_of, run_layer
from shardloop.invariant.rows import rms_norm, score
from shardloop.model.config import DecoderConfig
from shardloop.model.rope import rope_frequencies
from shardloop.policy import Policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """Which tokens of packed rows are real, and where they lie when each sequence has a row."""

    place_n: Tensor
    """Flat index into B*T of each real token."""
    padded_place_n: Tensor
    """Its flat index into S*T."""
    positions_ST: Tensor
    """Position of each token of a sequence; -1 after its end."""

    @classmethod
    def of(cls, segment_ids_BT: Tensor, position_ids_BT: Tensor) -> "Sequences":
        real_BT = segment_ids_BT >= 0
        # Rows of padding alone keep one token, so that every rank's layers run.
        real_BT[0, 0] = True
        row, column = real_BT.nonzero().unbind(1)
        key_n = row * (segment_ids_BT.shape[1] + 1) + segment_ids_BT[row, column]
        _, sequence_n, lengths_S = key_n.unique_consecutive(return_inverse=True, return_counts=True)
        position_n = position_ids_BT[row, column]
        longest = int(lengths_S.max())
        positions_T = torch.arange(longest, device=key_n.device)
        return cls(
            place_n=row * segment_ids_BT.shape[1] + column,
            padded_place_n=sequence_n * longest + position_n,
            positions_ST=torch.where(positions_T < lengths_S[:, None], positions_T, -1),
        )

    def attend(self, q_nHE: Tensor, k_nKE: Tensor, v_nKE: Tensor) -> Tensor:
        """Causal attention within each sequence: [n, H, E]."""
        q_STHE, k_STKE, v_STKE = (self._spread(x) for x in (q_nHE, k_nKE, v_nKE))
        out_STHE = attention(
            q_STHE, k_STKE.transpose(1, 2), v_STKE.transpose(1, 2), self.positions_ST
        )
        return out_STHE.flatten(0, 1).index_select(0, self.padded_place_n)

    def _spread(self, x: Tensor) -> Tensor:
        flat = x.new_zeros(self.positions_ST.numel(), *x.shape[1:])
        return flat.index_copy(0, self.padded_place_n, x).unflatten(0, self.positions_ST.shape)


class InvariantPolicy(Policy):
    """`Policy` whose value for a token depends on that token's own sequence only."""

    def __init__(
        self, causal_lm: nn.Module, config: DecoderConfig, *, tp_size: int, dtype: torch.dtype
    ) -> None:
        """Takes over the layers of `causal_lm`, which is to compute in `dtype`.

        Raises:
            UsageError: as `check_invariance`.
        """
        super().__init__(causal_lm)
        device = next(causal_lm.parameters()).device
        check_invariance(config, tp_size=tp_size, dtype=dtype, device=device)
        self._config = config
        for layer in self.model.layers:  # type: ignore[union-attr]
            layer.forward = partial(_layer_forward, layer, config)

    def forward(
        self,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        segment_ids_BT: Tensor,
        target_positions_n: Tensor,
        target_ids_n: Tensor,
        *,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """As `Policy.forward`."""
        model: Any = self.model
        sequences = Sequences.of(segment_ids_BT, position_ids_BT)
        place_n = sequences.place_n
        x_nD = F.embedding(input_ids_BT.flatten()[place_n], model.embed_tokens.weight)
        frequencies = rope_frequencies(self._config.head_dim, self._config.rope).to(x_nD.device)
        cos_sin = rope_of(position_ids_BT.flatten()[place_n], frequencies, dtype=x_nD.dtype)
        for layer in model.layers:
            x_nD = layer(x_nD, cos_sin=cos_sin, attend=sequences.attend)
        index_of = torch.zeros_like(input_ids_BT.flatten())
        index_of[place_n] = torch.arange(len(place_n), device=x_nD.device)
        hidden_nD = rms_norm(x_nD, model.norm.weight, eps=self._config.norm_eps)
        hidden_mD = hidden_nD.index_select(0, index_of[target_positions_n])
        weight_VD: Tensor = self.lm_head.weight  # type: ignore[assignment]
        return score(hidden_mD, weight_VD, target_ids_n, temperature=temperature)


def _layer_forward(layer: Any, config: DecoderConfig, x_nD: Tensor, **inputs: Any) -> Tensor:
    return run_layer(
        x_nD, layer_weights(layer), head_dim=config.head_dim, eps=config.norm_eps, **inputs
    )


def layer_weights(layer: Any) -> LayerWeights:
    """The parameters of a transformers decoder layer, as they are now."""
    attn, mlp = layer.self_attn, layer.mlp
    q, k, v, o, gate, up, down = (
        Projection(weight=module.weight, bias=module.bias)
        for module in (
            attn.q_proj,
            attn.k_proj,
            attn.v_proj,
            attn.o_proj,
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
        )
    )
    has_norm = hasattr(attn, "q_norm")
    return LayerWeights(
        q=q,
        k=k,
        v=v,
        o=o,
        gate=gate,
        up=up,
        down=down,
        input_norm=layer.input_layernorm.weight,
        post_attention_norm=layer.post_attention_layernorm.weight,
        q_norm=attn.q_norm.weight if has_norm else None,
        k_norm=attn.k_norm.weight if has_norm else None,
    )
