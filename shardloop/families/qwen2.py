"""The Qwen2 family as a table: q, k and v have biases. Read by `shardloop.families`. Floor 1."""

from shardloop.families.rows import LAYER_NORMS, gated_mlp
from shardloop.families.table import Family, Row

QWEN2 = Family(
    model_type="qwen2",
    rows=(
        Row("self_attn.q_proj.weight", "q hidden"),
        Row("self_attn.q_proj.bias", "q"),
        Row("self_attn.k_proj.weight", "kv hidden"),
        Row("self_attn.k_proj.bias", "kv"),
        Row("self_attn.v_proj.weight", "kv hidden"),
        Row("self_attn.v_proj.bias", "kv"),
        Row("self_attn.o_proj.weight", "hidden q"),
        *gated_mlp("mlp", "intermediate"),
        *LAYER_NORMS,
    ),
)
