"""Public models by name: the fields of their config.json that fix names and shapes. Floor 1.

Called by the command line, benchmarks and tests, to plan for a model that is not on this machine.
The values are those of the config.json that the authors publish with the weights (meta-llama, Qwen,
mistralai, deepseek-ai, moonshotai, HuggingFaceTB); tests hold them to the published totals. For
DeepSeek-V3 and Kimi-K2 this is the model without layers for predicting several tokens.
"""

from difflib import get_close_matches
from typing import Any

from shardloop.errors import ModelError


def public_model(name: str) -> dict[str, Any]:
    """What `canonical_model` needs of a public model's config, by its name in any case.

    Raises:
        ModelError: it is not one of `PUBLIC`.
    """
    known = {key.lower(): key for key in PUBLIC}
    if name.lower() not in known:
        near = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        hint = f"did you mean {known[near[0]]}? " if near else ""
        raise ModelError(
            f"model {name!r} is not known; {hint}choose from {', '.join(PUBLIC)}, or give the "
            "config.json of the model"
        )
    return dict(PUBLIC[known[name.lower()]])


def _table(columns: str, rows: dict[str, tuple[Any, ...]]) -> dict[str, dict[str, Any]]:
    names = columns.split()
    return {model: dict(zip(names, row, strict=True)) for model, row in rows.items()}


GROUPED_QUERY = (
    "model_type num_hidden_layers hidden_size intermediate_size num_attention_heads "
    "num_key_value_heads head_dim vocab_size tie_word_embeddings"
)
LATENT = (
    "model_type num_hidden_layers first_k_dense_replace hidden_size intermediate_size "
    "moe_intermediate_size n_routed_experts n_shared_experts num_attention_heads q_lora_rank "
    "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim vocab_size tie_word_embeddings"
)

# fmt: off
PUBLIC = {
    **_table(GROUPED_QUERY, {
        "Llama-3.1-8B": ("llama", 32, 4096, 14336, 32, 8, 128, 128256, False),
        "Llama-3-70B": ("llama", 80, 8192, 28672, 64, 8, 128, 128256, False),
        "Llama-3.1-405B": ("llama", 126, 16384, 53248, 128, 8, 128, 128256, False),
        "SmolLM2-135M": ("llama", 30, 576, 1536, 9, 3, 64, 49152, True),
        "Qwen2.5-7B": ("qwen2", 28, 3584, 18944, 28, 4, 128, 152064, False),
        "Qwen3-0.6B": ("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True),
        "Qwen3-4B": ("qwen3", 36, 2560, 9728, 32, 8, 128, 151936, True),
        "Qwen3-8B": ("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, False),
    }),
    **_table(GROUPED_QUERY + " moe_intermediate_size num_experts", {
        "Qwen3-30B-A3B": ("qwen3_moe", 48, 2048, 6144, 32, 4, 128, 151936, False, 768, 128),
        "Qwen3-235B-A22B": ("qwen3_moe", 94, 4096, 12288, 64, 4, 128, 151936, False, 1536, 128),
    }),
    **_table(GROUPED_QUERY + " num_local_experts", {
        "Mixtral-8x7B": ("mixtral", 32, 4096, 14336, 32, 8, 128, 32000, False, 8),
    }),
    **_table(LATENT, {
        "DeepSeek-V3": ("deepseek_v3", 61, 3, 7168, 18432, 2048, 256, 1, 128, 1536,
                        512, 128, 64, 128, 129280, False),
        "Kimi-K2": ("kimi_k2", 61, 1, 7168, 18432, 2048, 384, 1, 64, 1536,
                    512, 128, 64, 128, 163840, False),
    }),
}
# fmt: on
