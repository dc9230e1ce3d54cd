"""The Qwen3-MoE family as a table: Qwen3 with routed experts. Read by `shardloop.families`.

Every layer has experts: configs that mix in dense layers are refused. Floor 1.
"""

from shardloop.families.table import Family, Row

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    only={"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
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
        Row("mlp.gate.weight", "experts hidden"),
        Row("mlp.experts.{expert}.gate_proj.weight", "expert_intermediate hidden"),
        Row("mlp.experts.{expert}.up_proj.weight", "expert_intermediate hidden"),
        Row("mlp.experts.{expert}.down_proj.weight", "hidden expert_intermediate"),
        Row("input_layernorm.weight", "hidden"),
        Row("post_attention_layernorm.weight", "hidden"),
    ),
)
