"""Small configs of the families with experts."""

from typing import Any

from tests.layout.reference import tiny_config


def moe_config(model_type: str, **changes: Any) -> dict[str, Any]:
    return {**tiny_config(model_type), **EXTRA[model_type], **changes}


EXTRA: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 6, "num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 6,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 7,
        "kv_lora_rank": 9,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    },
}
