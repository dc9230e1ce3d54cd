"""The Llama family as a table; SmolLM2 shares it. Read by `shardloop.families`. Floor 1."""

from shardloop.families.table import Family, Row

LLAMA = Family(
    model_type="llama",
    rows=(
        Row("self_attn.q_proj.weight", "q hidden"),
        Row("self_attn.q_proj.bias", "q", when="attention_bias"),
        Row("self_attn.k_proj.weight", "kv hidden"),
        Row("self_attn.k_proj.bias", "kv", when="attention_bias"),
        Row("self_attn.v_proj.weight", "kv hidden"),
        Row("self_attn.v_proj.bias", "kv", when="attention_bias"),
        Row("self_attn.o_proj.weight", "hidden q"),
        Row("self_attn.o_proj.bias", "hidden", when="attention_bias"),
        Row("mlp.gate_proj.weight", "intermediate hidden"),
        Row("mlp.gate_proj.bias", "intermediate", when="mlp_bias"),
        Row("mlp.up_proj.weight", "intermediate hidden"),
        Row("mlp.up_proj.bias", "intermediate", when="mlp_bias"),
        Row("mlp.down_proj.weight", "hidden intermediate"),
        Row("mlp.down_proj.bias", "hidden", when="mlp_bias"),
        Row("input_layernorm.weight", "hidden"),
        Row("post_attention_layernorm.weight", "hidden"),
    ),
)
