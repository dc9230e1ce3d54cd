"""What the decoder needs to know of a config.json; refuses by name what it cannot run.

Called by engines and tests. Floor 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardloop.errors import ModelError
from shardloop.families import canonical_model

Rope = Mapping[str, Any]

_LLAMA3_ROPE_KEYS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes and switches of one decoder. All sizes are global, never per rank."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    """`rope_type` ("default" or "llama3"), `rope_theta` and the numbers of that type."""
    tied: bool
    qkv_bias: bool
    qk_norm: bool

    @classmethod
    def from_hf(cls, hf_config: Mapping[str, Any]) -> "DecoderConfig":
        """Read the contents of a config.json, of transformers 5 or older.

        Raises:
            ModelError: an unknown family, or settings that would change the result and are not
                supported (sliding windows, other activations, biases beyond q, k and v, other
                rotary embeddings).
        """
        model = canonical_model(hf_config)
        names = model.tensor_shapes().keys()
        _refuse_unsupported(hf_config, names=list(names))
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            vocab_size=model.vocab_size,
            max_positions=_required(hf_config, "max_position_embeddings"),
            norm_eps=_required(hf_config, "rms_norm_eps"),
            rope=_read_rope(hf_config),
            tied=model.tied,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in names,
            qk_norm="model.layers.0.self_attn.q_norm.weight" in names,
        )

    def local_heads(self, tp_size: int) -> tuple[int, int]:
        """Query heads and kv heads of each of `tp_size` ranks; kv heads may have several owners."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        fits = heads % tp_size == 0 and (kv_heads % tp_size == 0 or tp_size % kv_heads == 0)
        assert fits, f"make_layout refuses tp={tp_size}"
        return heads // tp_size, max(1, kv_heads // tp_size)

    def local_vocab(self, tp_size: int) -> int:
        """Rows of the embedding on each rank: the vocabulary, padded at its end to equal shares."""
        return -(-self.vocab_size // tp_size)


def _required(hf_config: Mapping[str, Any], key: str) -> Any:
    if hf_config.get(key) is None:
        raise ModelError(f"config.json has no {key}; add it as the model's authors give it")
    return hf_config[key]


def _refuse_unsupported(hf_config: Mapping[str, Any], *, names: list[str]) -> None:
    activation = hf_config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act={activation!r} is not supported; choose a model with silu")
    layer_types = set(hf_config.get("layer_types") or ()) - {"full_attention"}
    if hf_config.get("use_sliding_window") or layer_types:
        raise ModelError(
            f"use_sliding_window={hf_config.get('use_sliding_window')!r} with layer_types "
            f"{sorted(layer_types)} is not supported; choose a model with full attention"
        )
    biased = {name.split(".")[-2] for name in names if name.endswith(".bias")}
    if biased - {"q_proj", "k_proj", "v_proj"}:
        raise ModelError(
            f"biases of {', '.join(sorted(biased))} (attention_bias="
            f"{hf_config.get('attention_bias')!r}, mlp_bias={hf_config.get('mlp_bias')!r}) are not "
            "supported; choose a model with biases on q, k and v only (Qwen2) or with none"
        )


def _read_rope(hf_config: Mapping[str, Any]) -> Rope:
    """`rope_parameters` of transformers 5, or `rope_scaling` and `rope_theta` of older ones."""
    given = hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {}
    rope_type = given.get("rope_type", given.get("type", "default"))
    theta = given.get("rope_theta", hf_config.get("rope_theta"))
    partial = given.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if rope_type not in ("default", "llama3"):
        raise ModelError(f"rope_type={rope_type!r} is not supported; choose default or llama3")
    if partial not in (None, 1.0):
        raise ModelError(
            f"partial_rotary_factor={partial} is not supported; choose a model with 1.0"
        )
    rope = {"rope_type": rope_type, "rope_theta": 10000.0 if theta is None else float(theta)}
    if rope_type == "llama3":
        missing = [key for key in _LLAMA3_ROPE_KEYS if key not in given]
        if missing:
            raise ModelError(
                f"rope_type='llama3' without {', '.join(missing)}; add them to config.json"
            )
        rope.update({key: given[key] for key in _LLAMA3_ROPE_KEYS})
    return rope
