"""The engine's decoder on batch-invariant kernels, over the same fused tensors. Floor 2.

Called by the local engine in place of `Decoder`. Each part of a fused weight is multiplied on its
own, since the trainer has them apart and a product's rounding may depend on its width.

Shapes: B rows, T tokens, D width, V vocabulary, H query heads, K kv heads, E head_dim.
"""

from typing import Any

import torch
from torch import Tensor

from shardloop.invariant.attention import attention
from shardloop.invariant.check import check_invariance
from shardloop.invariant.layer import LayerWeights, Projection, rope_of, run_layer
from shardloop.invariant.rows import linear, rms_norm
from shardloop.model.config import DecoderConfig
from shardloop.model.decoder import AttentionHistory, Decoder, DecoderLayer
from shardloop.model.tensor_parallel import TensorParallel


class InvariantDecoder(Decoder):
    """`Decoder` on one rank: same tensors, same calls, and rows that do not know of each other."""

    attention = staticmethod(attention)

    def __init__(
        self,
        config: DecoderConfig,
        *,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """As `Decoder`.

        Raises:
            UsageError: as `check_invariance`.
        """
        check_invariance(config, tp_size=tp.size, dtype=dtype, device=device)
        super().__init__(config, tp=tp, dtype=dtype, device=device)

    @torch.no_grad()
    def forward(
        self,
        token_ids_BT: Tensor,
        *,
        positions_BT: Tensor,
        num_positions: int,
        history: AttentionHistory,
    ) -> Tensor:
        """As `Decoder.forward`."""
        shape = token_ids_BT.shape
        cos_sin = rope_of(positions_BT.reshape(-1), self._frequencies, dtype=self.dtype)
        x_nD = self.model.embed_tokens(token_ids_BT.reshape(-1))
        for index, layer in enumerate(self.model.layers):

            def attend(q: Tensor, k: Tensor, v: Tensor, index: int = index) -> Tensor:
                q, k, v = (x.unflatten(0, shape) for x in (q, k, v))
                return history.attend(index, q, k, v).flatten(0, 1)

            x_nD = run_layer(
                x_nD,
                layer_weights(layer),
                head_dim=self.config.head_dim,
                eps=self.config.norm_eps,
                cos_sin=cos_sin,
                attend=attend,
            )
        hidden_nD = rms_norm(x_nD, self.model.norm.weight, eps=self.config.norm_eps)
        return hidden_nD.unflatten(0, shape)

    @torch.no_grad()
    def logits(self, hidden_BD: Tensor) -> Tensor:
        """As `Decoder.logits`."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits_nV = linear(hidden_BD.flatten(0, -2), head.weight, None)
        return logits_nV.unflatten(0, hidden_BD.shape[:-1])


def layer_weights(layer: Any) -> LayerWeights:
    """Views of the fused tensors of a `DecoderLayer`, as they are now."""
    assert isinstance(layer, DecoderLayer), type(layer)
    attn, mlp = layer.self_attn, layer.mlp
    biases = [None] * 3 if attn.qkv_proj.bias is None else attn.qkv_proj.bias.split(attn.split)
    q, k, v = (
        Projection(weight=weight, bias=bias)
        for weight, bias in zip(attn.qkv_proj.weight.split(attn.split), biases, strict=True)
    )
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    return LayerWeights(
        q=q,
        k=k,
        v=v,
        o=Projection(weight=attn.o_proj.weight),
        gate=Projection(weight=gate),
        up=Projection(weight=up),
        down=Projection(weight=mlp.down_proj.weight),
        input_norm=layer.input_layernorm.weight,
        post_attention_norm=layer.post_attention_layernorm.weight,
        q_norm=None if attn.q_norm is None else attn.q_norm.weight,
        k_norm=None if attn.k_norm is None else attn.k_norm.weight,
    )
