"""A decoder-only transformer in fused, tensor-parallel layout, for inference.

Called by the engine's runner. Floor 2. Weights start as NaN: an element that no one wrote shows in
the logits instead of passing for a weight.

Shapes: B rows, T tokens, V vocabulary, D width, H query heads and K kv heads of this rank,
E head_dim, L layers, 2 for keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardloop.model.config import DecoderConfig
from shardloop.model.rope import rope_frequencies, rope_table, rotate
from shardloop.model.tensor_parallel import TensorParallel

AttentionFn = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(q_BTHE, keys_BKCE, values_BKCE, positions_BT) -> [B, T, H, E]: a query sees the keys of its row
up to its own position."""


class AttentionHistory(Protocol):
    """Where keys and values live, and what new tokens may attend to."""

    def attend(self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
        """Take k and v into the history of `layer`; the new tokens' attention [B, T, H, E]."""
        ...


class PromptAttention:
    """Causal attention within whole sequences from position 0; keeps the keys and values it saw.

    Rows may be padded at their end: a real token never sees the padding after it.
    """

    def __init__(self, attention: AttentionFn | None = None) -> None:
        """`attention` takes the place of torch's own."""
        self._layers: list[Tensor] = []
        self._attention = attention

    def attend(self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
        assert layer == len(self._layers), "layers attend in order, once"
        kv_2BKTE = torch.stack((k_BTKE, v_BTKE)).transpose(2, 3).contiguous()
        self._layers.append(kv_2BKTE)
        keys, values = kv_2BKTE
        if self._attention is not None:
            positions_T = torch.arange(q_BTHE.shape[1], device=q_BTHE.device)
            return self._attention(q_BTHE, keys, values, positions_T.expand(len(q_BTHE), -1))
        out_BHTE = F.scaled_dot_product_attention(
            q_BTHE.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True
        )
        return out_BHTE.transpose(1, 2)

    def kv(self) -> Tensor:
        """Keys (0) and values (1) of all layers: [L, 2, B, K, T, E]."""
        return torch.stack(self._layers)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where one rank's weights are and how it reaches its peers."""

    tp: TensorParallel
    dtype: torch.dtype
    device: torch.device

    def unwritten(self, *shape: int) -> nn.Parameter:
        weight = torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)
        return nn.Parameter(weight, requires_grad=False)


class Linear(nn.Module):
    """x @ weight.T (+ bias), with the rows or columns of this rank only."""

    def __init__(self, num_in: int, num_out: int, site: Site, *, bias: bool) -> None:
        super().__init__()
        self.weight = site.unwritten(num_out, num_in)
        self.bias = site.unwritten(num_out) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight; the rms is taken in float32, or in float64 for a float64 model."""

    def __init__(self, width: int, site: Site, *, eps: float) -> None:
        super().__init__()
        self.weight = site.unwritten(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention over this rank's heads."""

    def __init__(self, config: DecoderConfig, layer: int, site: Site) -> None:
        super().__init__()
        self.layer, self.tp, self.head_dim = layer, site.tp, config.head_dim
        heads, kv_heads = config.local_heads(site.tp.size)
        self.split = [heads * self.head_dim, kv_heads * self.head_dim, kv_heads * self.head_dim]
        self.qkv_proj = Linear(config.hidden_size, sum(self.split), site, bias=config.qkv_bias)
        self.o_proj = Linear(self.split[0], config.hidden_size, site, bias=False)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, site, eps=config.norm_eps)
            self.k_norm = RMSNorm(self.head_dim, site, eps=config.norm_eps)

    def forward(self, x_BTD: Tensor, *, cos_sin: Tensor, history: AttentionHistory) -> Tensor:
        q, k, v = (
            x.unflatten(-1, (-1, self.head_dim)) for x in self.qkv_proj(x_BTD).split(self.split, -1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        out_BTHE = history.attend(self.layer, rotate(q, cos_sin), rotate(k, cos_sin), v)
        return self.tp.all_reduce(self.o_proj(out_BTHE.flatten(-2)))


class MLP(nn.Module):
    """SwiGLU over this rank's share of the intermediate width."""

    def __init__(self, config: DecoderConfig, site: Site) -> None:
        super().__init__()
        self.tp = site.tp
        width = config.intermediate_size // site.tp.size
        self.gate_up_proj = Linear(config.hidden_size, 2 * width, site, bias=False)
        self.down_proj = Linear(width, config.hidden_size, site, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x_BTD).chunk(2, dim=-1)
        return self.tp.all_reduce(self.down_proj(F.silu(gate) * up))


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int, site: Site) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        self.self_attn = Attention(config, layer, site)
        self.mlp = MLP(config, site)
        self.input_layernorm = RMSNorm(width, site, eps=eps)
        self.post_attention_layernorm = RMSNorm(width, site, eps=eps)

    def forward(self, x_BTD: Tensor, *, cos_sin: Tensor, history: AttentionHistory) -> Tensor:
        x_BTD = x_BTD + self.self_attn(
            self.input_layernorm(x_BTD), cos_sin=cos_sin, history=history
        )
        out_BTD: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out_BTD


class VocabEmbedding(nn.Module):
    """Rows of the embedding, or of the head, for this rank's ids; padding, at the end, is 0."""

    def __init__(self, config: DecoderConfig, site: Site) -> None:
        super().__init__()
        self.tp, self.num_local = site.tp, config.local_vocab(site.tp.size)
        self.first_id = site.tp.rank * self.num_local
        self.weight = site.unwritten(self.num_local, config.hidden_size)
        self.weight[max(0, config.vocab_size - self.first_id) :] = 0.0

    def forward(self, token_ids_BT: Tensor) -> Tensor:
        local_BT = token_ids_BT - self.first_id
        if self.tp.size == 1:
            return F.embedding(local_BT, self.weight)
        elsewhere_BT = (local_BT < 0) | (local_BT >= self.num_local)
        x_BTD = F.embedding(local_BT.masked_fill(elsewhere_BT, 0), self.weight)
        return self.tp.all_reduce(x_BTD.masked_fill(elsewhere_BT[..., None], 0.0))


class Backbone(nn.Module):
    """Everything below the head; the `model.` of tensor names."""

    def __init__(self, config: DecoderConfig, site: Site) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config, site)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, site) for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, site, eps=config.norm_eps)


class Decoder(nn.Module):
    """One tensor-parallel rank of a decoder; all ranks of `tp` make the same calls."""

    attention: AttentionFn | None = None
    """What histories use in place of torch's attention, if anything."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocates the weights, all NaN; write them through `tensors()`."""
        super().__init__()
        site = Site(tp=tp, dtype=dtype, device=torch.device(device))
        self.config, self.tp, self.dtype = config, tp, dtype
        self.model = Backbone(config, site)
        self.lm_head = None if config.tied else VocabEmbedding(config, site)
        self._frequencies = rope_frequencies(config.head_dim, config.rope).to(site.device)
        self._rope_table = rope_table(self._frequencies, num_positions=0, dtype=dtype)

    def tensors(self) -> dict[str, Tensor]:
        """The live weights of this rank by engine local name; a tied head has none of its own."""
        return {name: parameter.data for name, parameter in self.named_parameters()}

    @torch.no_grad()
    def forward(
        self,
        token_ids_BT: Tensor,
        *,
        positions_BT: Tensor,
        num_positions: int,
        history: AttentionHistory,
    ) -> Tensor:
        """Collective over `tp`: hidden states [B, T, D] after the last norm.

        Every position is below `num_positions`, which is within the model's context.
        """
        cos_sin = self._cos_sin(num_positions)[:, positions_BT, None]
        x_BTD = self.model.embed_tokens(token_ids_BT)
        for layer in self.model.layers:
            x_BTD = layer(x_BTD, cos_sin=cos_sin, history=history)
        hidden_BTD: Tensor = self.model.norm(x_BTD)
        return hidden_BTD

    @torch.no_grad()
    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Collective over `tp`: [..., V] without padding ids, float32 or wider."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits_BV = self.tp.all_gather_last_dim(F.linear(hidden_BD, head.weight))
        wide = torch.promote_types(self.dtype, torch.float32)
        return logits_BV[..., : self.config.vocab_size].to(wide)

    def _cos_sin(self, num_positions: int) -> Tensor:
        if self._rope_table.shape[1] < num_positions:
            grown = min(
                max(num_positions, 2 * self._rope_table.shape[1]), self.config.max_positions
            )
            assert num_positions <= grown, "callers keep positions within the model's context"
            self._rope_table = rope_table(self._frequencies, num_positions=grown, dtype=self.dtype)
        return self._rope_table
