"""The DeepSeek-V3 family as a table; Kimi-K2 shares it. Read by `shardloop.families`. Floor 1.

Latent attention (MLA): k and v of all heads are made from one latent per token, and so is q unless
`q_lora_rank` is null. The first layers are dense, the others have routed and shared experts. The
extra layer for predicting several tokens (MTP), which checkpoints keep after the last, is left out.
"""

from shardloop.families.rows import LAYER_NORMS, gated_mlp
from shardloop.families.table import Family, Row, Size

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    num_dense="first_k_dense_replace",
    only={"moe_layer_freq": (1,), "topk_method": ("noaux_tc",), "attention_bias": (False,)},
    sizes={
        "experts": Size("n_routed_experts"),
        "shared_intermediate": Size("moe_intermediate_size", times="n_shared_experts"),
        "q": Size("qk_nope_head_dim + qk_rope_head_dim", heads="num_attention_heads"),
        "mla_kv": Size("qk_nope_head_dim + v_head_dim", heads="num_attention_heads"),
        "mla_v": Size("v_head_dim", heads="num_attention_heads"),
        "q_latent": Size("q_lora_rank"),
        "kv_latent": Size("kv_lora_rank"),
        "kv_latent_rope": Size("kv_lora_rank + qk_rope_head_dim"),
    },
    rows=(
        Row("self_attn.q_proj.weight", "q hidden", when="no q_lora_rank"),
        Row("self_attn.q_a_proj.weight", "q_latent hidden", when="q_lora_rank"),
        Row("self_attn.q_a_layernorm.weight", "q_latent", when="q_lora_rank"),
        Row("self_attn.q_b_proj.weight", "q q_latent", when="q_lora_rank"),
        Row("self_attn.kv_a_proj_with_mqa.weight", "kv_latent_rope hidden"),
        Row("self_attn.kv_a_layernorm.weight", "kv_latent"),
        Row("self_attn.kv_b_proj.weight", "mla_kv kv_latent"),
        Row("self_attn.o_proj.weight", "hidden mla_v"),
        *gated_mlp("mlp", "intermediate", layers="dense"),
        Row("mlp.gate.weight", "experts hidden", layers="moe"),
        Row("mlp.gate.e_score_correction_bias", "experts", layers="moe", dtype="float32"),
        *gated_mlp("mlp.experts.{expert}", "expert_intermediate", layers="moe"),
        *gated_mlp("mlp.shared_experts", "shared_intermediate", layers="moe"),
        *LAYER_NORMS,
    ),
)
