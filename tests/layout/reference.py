"""Small models with labels, and random models and layout strings that fit them.

`labels` fills each tensor with its own element numbers, so a misplaced element shows as a wrong
number; `expected_local` cuts full tensors by plain indexing.
"""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from shardloop.families import CanonicalModel, canonical_model
from shardloop.families.fp8 import with_block_fp8
from shardloop.families.lora import with_lora
from tests.layout.expected import BLOCK, Arrays, expected_local

__all__ = ["Arrays", "expected_local"]
LARGE = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
"""The sizes of a 70B model."""


def tiny_config(model_type: str = "llama", **sizes: Any) -> dict[str, Any]:
    config = {
        "model_type": model_type,
        "vocab_size": 10,
        "hidden_size": 20,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 2,
        "tie_word_embeddings": False,
    }
    return {**config, **sizes}


def tiny_model(model_type: str = "llama", **sizes: Any) -> CanonicalModel:
    return canonical_model(tiny_config(model_type, **sizes))


def labels(model: CanonicalModel) -> Arrays:
    """Every element of every tensor gets a number of its own, from 1; 0 is left for padding."""
    full, start = {}, 1
    for name, shape in model.tensor_shapes().items():
        size = int(np.prod(shape))
        full[name] = np.arange(start, start + size).reshape(shape)
        start += size
    return full


@st.composite
def models(draw: st.DrawFn) -> CanonicalModel:
    """Small models of every family: grouped and ungrouped kv, biases, tied, odd vocabularies."""
    num_kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    return tiny_model(
        draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        vocab_size=draw(st.integers(1, 14)),
        hidden_size=draw(st.integers(1, 13)),
        intermediate_size=12 * draw(st.sampled_from([1, 2])),
        num_hidden_layers=draw(st.integers(1, 4)),
        num_attention_heads=num_kv_heads * draw(st.sampled_from([1, 2, 4])),
        num_key_value_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([1, 2, 3])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
    )


@st.composite
def specs(draw: st.DrawFn, model: CanonicalModel) -> str:
    """Layout strings that fit the model, axes in any order."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    fits = [
        tp
        for tp in range(1, heads + 1)
        if heads % tp == 0
        and (kv_heads % tp == 0 or tp % kv_heads == 0)
        and model.intermediate_size % tp == 0
    ]
    tp = f"tp={draw(st.sampled_from(fits))}"
    if draw(st.booleans()):
        axes = [tp, f"replicas={draw(st.integers(1, 3))}"]
        return "engine:" + ",".join(draw(st.permutations(axes))[: draw(st.integers(1, 2))])
    axes = [tp, f"fsdp={draw(st.integers(1, 5))}", f"dp={draw(st.integers(1, 3))}"]
    return ",".join(draw(st.permutations(axes))[: draw(st.integers(1, 3))])


def widths(model: CanonicalModel, meanings: tuple[str, ...], most: int = 6) -> list[int]:
    """Numbers of ranks that may share these meanings."""
    kv = model.units.get("kv", 1)
    return [
        n
        for n in range(1, most + 1)
        if all(model.units.get(meaning, 0) % n == 0 for meaning in meanings)
        and (kv % n == 0 or n % kv == 0)
    ]


DENSE = ("q", "intermediate", "shared_intermediate", "mla_kv")
EXPERT = ("expert_intermediate",)


@st.composite
def any_models(draw: st.DrawFn) -> CanonicalModel:
    """Small models of every family, some with FP8 scales or LoRA factors."""
    kind = draw(st.sampled_from(["dense", "qwen3_moe", "mixtral", "deepseek_v3"]))
    if kind == "dense":
        model = draw(models())
    else:
        model = tiny_model(
            kind,
            vocab_size=draw(st.integers(1, 14)),
            hidden_size=draw(st.integers(1, 9)),
            intermediate_size=12,
            num_hidden_layers=draw(st.integers(1, 5)),
            tie_word_embeddings=draw(st.booleans()),
            **draw(moe_sizes(kind)),
        )
    extra = draw(st.sampled_from(["", "", "fp8", "lora"]))
    if extra == "fp8":
        return with_block_fp8(model, block=BLOCK)
    if extra == "lora":
        modules = {c.key.split(".")[-2] for c in model.classes if c.is_linear}
        return with_lora(model, rank=2, targets=sorted(modules))
    return model


@st.composite
def moe_sizes(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    num_experts = draw(st.integers(1, 6))
    if kind == "mixtral":
        return {"num_local_experts": num_experts}
    sizes: dict[str, Any] = {"moe_intermediate_size": draw(st.sampled_from([4, 6]))}
    if kind == "qwen3_moe":
        return {"num_experts": num_experts, **sizes}
    return {
        "num_key_value_heads": 4,
        "first_k_dense_replace": draw(st.integers(0, 3)),
        "n_routed_experts": num_experts,
        "n_shared_experts": 2,
        "q_lora_rank": draw(st.sampled_from([None, 7])),
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
        **sizes,
    }


@st.composite
def any_specs(draw: st.DrawFn, model: CanonicalModel) -> str:
    """Layout strings of every scheme that fit the model; axes that share ranks are adjacent."""
    schemes = ["", "", "engine:"]
    plain = not any("lora" in c.key or c.key.endswith("_scale_inv") for c in model.classes)
    scheme = draw(st.sampled_from([*schemes, "megatron:"] if plain else schemes))
    num_experts = model.sizes.get("experts", 0)
    folded = num_experts > 0 and draw(st.booleans())
    tp = draw(st.sampled_from(widths(model, DENSE if folded else used(model))))
    if scheme == "megatron:" and "kv" in model.units:
        tp = tp if (model.sizes["q"] + 2 * model.sizes["kv"]) % tp == 0 else 1
    inner = [f"tp={tp}"]
    num_dense = tp
    if scheme == "" and draw(st.booleans()):
        shards = draw(st.integers(1, 5))
        inner.append(f"{draw(st.sampled_from(['fsdp', 'zero3']))}={shards}")
        num_dense *= shards
    if folded:
        inner += draw(expert_axes(model, scheme, num_dense, tp))
    outer = ["replicas" if scheme == "engine:" else "dp"]
    outer = [f"{outer[0]}={draw(st.integers(1, 2))}"] if draw(st.booleans()) else []
    if scheme != "engine:":
        outer += draw(stage_axes(model, scheme))
    inner = draw(st.permutations(inner))
    outer = draw(st.permutations(outer))
    place = draw(st.integers(0, len(outer)))
    return scheme + ",".join([*outer[:place], *inner, *outer[place:]])


def used(model: CanonicalModel) -> tuple[str, ...]:
    return tuple(meaning for meaning in (*DENSE, *EXPERT) if meaning in model.units)


@st.composite
def expert_axes(draw: st.DrawFn, model: CanonicalModel, scheme: str, dense: int, tp: int) -> Any:
    num_experts = model.sizes["experts"]
    etps = [n for n in range(1, 7) if model.units["expert_intermediate"] % n == 0]
    default = tp if scheme == "megatron:" else 1
    fits = [
        (ep, etp)
        for ep in range(1, num_experts + 1)
        for etp in ([1] if scheme == "engine:" else etps)
        if (scheme == "" or num_experts % ep == 0)
        and (dense % (ep * etp) == 0 or ep * etp % dense == 0)
    ]
    ep, etp = draw(st.sampled_from(fits))
    names_etp = scheme != "engine:" and (etp != default or draw(st.booleans()))
    return [f"ep={ep}", f"etp={etp}"] if names_etp else [f"ep={ep}"]


@st.composite
def stage_axes(draw: st.DrawFn, model: CanonicalModel, scheme: str) -> list[str]:
    num_layers = model.num_layers
    stages = [n for n in range(1, num_layers + 1) if (n - 1) * -(-num_layers // n) < num_layers]
    if not draw(st.booleans()):
        return []
    pp = draw(st.sampled_from(stages))
    chunks = [n for n in range(2, num_layers + 1) if num_layers % (pp * n) == 0]
    if scheme == "megatron:" and chunks and draw(st.booleans()):
        return [f"pp={pp}", f"vpp={draw(st.sampled_from(chunks))}"]
    return [f"pp={pp}"]
