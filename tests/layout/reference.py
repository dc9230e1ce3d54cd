"""What each rank must hold, written out per tensor name without the library's algebra.

`labels` fills each tensor with its own element numbers, so a misplaced element shows as a wrong
number; `expected_local` cuts full tensors by plain indexing.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from shardloop.families import CanonicalModel, canonical_model

Arrays = dict[str, np.ndarray[Any, Any]]
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


def expected_local(model: CanonicalModel, spec: str, rank: int, full: Mapping[str, Any]) -> Arrays:
    """The local tensors of one rank, by plain indexing of the full ones."""
    scheme, _, body = spec.rpartition(":")
    axes = [(name, int(size)) for name, size in (item.split("=") for item in body.split(","))]
    place = np.unravel_index(rank, [size for _, size in axes])
    at = {name: (int(c), size) for (name, size), c in zip(axes, place, strict=True)}
    tp = at.get("tp", (0, 1))
    if scheme == "engine":
        return _engine(model, tp, full)
    local = {name: _tp_part(model, name, tensor, tp) for name, tensor in full.items()}
    return {name: _chunk(tensor, *at.get("fsdp", (0, 1))) for name, tensor in local.items()}


def _chunk(tensor: Any, index: int, parts: int, dim: int = 0) -> Any:
    size = -(-tensor.shape[dim] // parts)
    return np.take(tensor, range(tensor.shape[dim])[index * size : (index + 1) * size], dim)


def _tp_part(model: CanonicalModel, name: str, tensor: Any, tp: tuple[int, int]) -> Any:
    index, parts = tp
    if any(stem in name for stem in ("q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")):
        return _chunk(tensor, index, parts)
    if "k_proj" in name or "v_proj" in name:
        heads = _kv_heads(index, parts, model.num_kv_heads)
        rows = [head * model.head_dim + d for head in heads for d in range(model.head_dim)]
        return tensor[rows]
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return _chunk(tensor, index, parts, dim=1)
    return tensor


def _kv_heads(index: int, parts: int, num_kv_heads: int) -> list[int]:
    if parts >= num_kv_heads:
        return [index // (parts // num_kv_heads)]
    each = num_kv_heads // parts
    return list(range(index * each, (index + 1) * each))


def _engine(model: CanonicalModel, tp: tuple[int, int], full: Mapping[str, Any]) -> Arrays:
    part = {name: _tp_part(model, name, tensor, tp) for name, tensor in full.items()}
    local: Arrays = {}
    for name, tensor in part.items():
        if "q_proj" in name:
            trio = [part[name.replace("q_proj", f"{kind}_proj")] for kind in "qkv"]
            local[name.replace("q_proj", "qkv_proj")] = np.concatenate(trio)
        elif "gate_proj" in name:
            pair = [tensor, part[name.replace("gate_proj", "up_proj")]]
            local[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(pair)
        elif "embed_tokens" in name or "lm_head" in name:
            rows = -(-model.vocab_size // tp[1])
            local[name] = np.concatenate(
                [tensor, np.zeros((rows - len(tensor), *tensor.shape[1:]), tensor.dtype)]
            )
        elif not any(stem in name for stem in ("k_proj", "v_proj", "up_proj")):
            local[name] = tensor
    return local


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
