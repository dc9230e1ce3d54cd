"""Rows that several families share, in the order of the state dict. Read by the families' tables.

Floor 1.
"""

from typing import Literal

from shardloop.families.table import Row

ATTENTION = (
    Row("self_attn.q_proj.weight", "q hidden"),
    Row("self_attn.q_proj.bias", "q", when="attention_bias"),
    Row("self_attn.k_proj.weight", "kv hidden"),
    Row("self_attn.k_proj.bias", "kv", when="attention_bias"),
    Row("self_attn.v_proj.weight", "kv hidden"),
    Row("self_attn.v_proj.bias", "kv", when="attention_bias"),
    Row("self_attn.o_proj.weight", "hidden q"),
    Row("self_attn.o_proj.bias", "hidden", when="attention_bias"),
)
"""Grouped-query attention whose biases are the config's choice."""

QK_NORMS = (
    Row("self_attn.q_norm.weight", "head_dim"),
    Row("self_attn.k_norm.weight", "head_dim"),
)
"""Of each head of q and k."""

LAYER_NORMS = (
    Row("input_layernorm.weight", "hidden"),
    Row("post_attention_layernorm.weight", "hidden"),
)


def gated_mlp(
    stem: str, width: str, *, layers: Literal["all", "dense", "moe"] = "all"
) -> tuple[Row, ...]:
    """Gate, up and down without biases.

    Args:
        stem: what their names begin with, such as `mlp`.
        width: meaning of what lies between hidden and hidden.
    """
    return (
        Row(f"{stem}.gate_proj.weight", f"{width} hidden", layers=layers),
        Row(f"{stem}.up_proj.weight", f"{width} hidden", layers=layers),
        Row(f"{stem}.down_proj.weight", f"hidden {width}", layers=layers),
    )
