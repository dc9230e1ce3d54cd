"""The dense Qwen3 family as a table: q and k are normed per head. Read by `shardloop.families`.

Floor 1.
"""

from shardloop.families.table import Family, Row

QWEN3 = Family(
    model_type="qwen3",
    head_dim=128,
    rows=(
        Row("self_attn.q_proj.weight", "q hidden"),
        Row("self_attn.q_proj.bias", "q", when="attention_bias"),
        Row("self_attn.k_proj.weight", "kv hidden"),
        Row("self_attn.k_proj.bias", "kv", when="attention_bias"),
        Row("self_attn.v_proj.weight", "kv hidden"),
        Row("self_attn.v_proj.bias", "kv", when="attention_bias"),
        Row("self_attn.o_proj.weight", "hidden q"),
        Row("self_attn.o_proj.bias", "hidden", when="attention_bias"),
        Row("self_attn.q_norm.weight", "head_dim"),
        Row("self_attn.k_norm.weight", "head_dim"),
        Row("mlp.gate_proj.weight", "intermediate hidden"),
        Row("mlp.up_proj.weight", "intermediate hidden"),
        Row("mlp.down_proj.weight", "hidden intermediate"),
        Row("input_layernorm.weight", "hidden"),
        Row("post_attention_layernorm.weight", "hidden"),
    ),
)
