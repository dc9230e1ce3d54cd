"""What the decoder needs to know of a config.json; refuses by name what it cannot run.

Called by engines and tests. Floor 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardloop.errors import ModelError
from shardloop.families import CanonicalModel, Fields, canonical_model

Rope = Mapping[str, Any]

DEFAULT_THETA = 10000.0

RUNNABLE = ("llama", "qwen2", "qwen3")
"""Families that the decoder computes; of the others there are only the names and shapes."""


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
            ModelError: an unknown family, or one that is not run here; fields that are missing or
                of another kind; or settings that would change the result and are not supported
                (sliding windows, other activations, biases beyond q, k and v, other rotary
                embeddings, quantisation).
        """
        model = canonical_model(hf_config)
        config = Fields(hf_config)
        _refuse_unsupported(config, model)
        keys = model.class_of
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            vocab_size=model.vocab_size,
            max_positions=config.whole("max_position_embeddings"),
            norm_eps=config.number("rms_norm_eps"),
            rope=_read_rope(config),
            tied=model.tied,
            qkv_bias="self_attn.q_proj.bias" in keys,
            qk_norm="self_attn.q_norm.weight" in keys,
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


def _refuse_unsupported(config: Fields, model: CanonicalModel) -> None:
    if model.name not in RUNNABLE:
        config.refuse(
            "model_type",
            "is a family that can be planned, resharded and converted but neither trained nor "
            f"run here; choose a model of type {', '.join(RUNNABLE)}",
        )
    config.choice("hidden_act", ("silu",), default="silu")
    if config.has("quantization_config"):
        config.refuse("quantization_config", "is not supported; choose unquantised weights")
    if config.flag("use_sliding_window"):
        config.refuse("use_sliding_window", "is not supported; choose a model of full attention")
    if config.has("layer_types") and config.values["layer_types"] != ["full_attention"] * (
        model.num_layers
    ):
        config.refuse(
            "layer_types",
            f"is not supported; it must be null or name full_attention for each of "
            f"{model.num_layers} layers",
        )
    biased = {name.split(".")[-2] for name in model.tensor_shapes() if name.endswith(".bias")}
    if biased - {"q_proj", "k_proj", "v_proj"}:
        raise ModelError(
            f"biases of {', '.join(sorted(biased))} (attention_bias="
            f"{config.flag('attention_bias')}, mlp_bias={config.flag('mlp_bias')}) are not "
            "supported; choose a model with biases on q, k and v only (Qwen2) or with none"
        )
    if model.head_dim % 2:
        raise ModelError(f"head_dim={model.head_dim} is odd; rotary embeddings need an even one")


def _read_rope(config: Fields) -> Rope:
    """`rope_parameters` of transformers 5, or `rope_scaling` and `rope_theta` of older ones."""
    new, old = config.section("rope_parameters"), config.section("rope_scaling")
    given = new if new.values else old
    for key, value in given.values.items():
        if isinstance(value, dict):
            given.refuse(key, "is not supported; write one set of values for all layers")
    type_key = "rope_type" if "rope_type" in given.values else "type"
    rope_type = given.choice(type_key, ("default", "llama3"), default="default")
    for fields in (given, config):
        if fields.values.get("partial_rotary_factor") not in (None, 1.0):
            fields.refuse("partial_rotary_factor", "is not supported; choose a model with 1.0")
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": DEFAULT_THETA}
    for fields in (config, given):
        if fields.has("rope_theta"):
            rope["rope_theta"] = fields.number("rope_theta")
    return rope | _llama3_numbers(given) if rope_type == "llama3" else rope


def _llama3_numbers(given: Fields) -> dict[str, float]:
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if low >= high:
        given.refuse("high_freq_factor", f"it must be above low_freq_factor={low:g}")
    return {
        "factor": given.number("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": given.whole("original_max_position_embeddings"),
    }
