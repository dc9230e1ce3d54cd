"""The Llama family as a table; SmolLM2 shares it. Read by `shardloop.families`. Floor 1."""

from shardloop.families.rows import ATTENTION, LAYER_NORMS
from shardloop.families.table import Family, Row

LLAMA = Family(
    model_type="llama",
    rows=(
        *ATTENTION,
        Row("mlp.gate_proj.weight", "intermediate hidden"),
        Row("mlp.gate_proj.bias", "intermediate", when="mlp_bias"),
        Row("mlp.up_proj.weight", "intermediate hidden"),
        Row("mlp.up_proj.bias", "intermediate", when="mlp_bias"),
        Row("mlp.down_proj.weight", "hidden intermediate"),
        Row("mlp.down_proj.bias", "hidden", when="mlp_bias"),
        *LAYER_NORMS,
    ),
)
