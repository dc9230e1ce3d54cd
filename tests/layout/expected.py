"""What each rank must hold under any scheme, by plain indexing of full tensors, name by name.

Written without the library's algebra: a rank's coordinates by division, then slices.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from shardloop.families import CanonicalModel

Arrays = dict[str, np.ndarray[Any, Any]]
BY_ROWS = [
    "q_proj",
    "q_b_proj",
    "kv_b_proj",
    "gate_proj",
    "up_proj",
    "w1",
    "w3",
    "embed_tokens",
    "lm_head",
]
BY_COLUMNS = ["o_proj", "down_proj", "w2"]
BY_HEADS = ["k_proj", "v_proj"]
BLOCK = 3
"""Of the FP8 scales in tests."""


@dataclass(frozen=True)
class Place:
    """A rank's coordinates: (index, how many) of each kind."""

    stage: tuple[int, int]
    vpp: int
    tp: tuple[int, int]
    chunk: tuple[int, int]
    flat: bool
    ep: tuple[int, int] = (0, 1)


def expected_local(model: CanonicalModel, spec: str, rank: int, full: Mapping[str, Any]) -> Arrays:
    """The local tensors of one rank, by plain indexing of the full ones."""
    scheme, _, body = spec.rpartition(":")
    axes = [(name, int(size)) for name, size in (item.split("=") for item in body.split(","))]
    dense, expert = places(scheme, axes, rank)
    own = {
        name: tensor
        for name, tensor in full.items()
        if stage_of(model, name, dense) == dense.stage[0] and has_expert(model, name, expert)
    }
    part = Parts(model, full, dense, expert)
    if scheme == "engine":
        return engine(model, own, part)
    if scheme == "megatron":
        return megatron(model, own, part)
    local = {name: part.chunk(name, part.of(name)) for name in own}
    if model.tied and dense.stage[1] > 1 and dense.stage[0] == dense.stage[1] - 1:
        name = "model.embed_tokens.weight"
        local["lm_head.weight"] = part.chunk(name, part.of(name))
    return local


def places(scheme: str, axes: list[tuple[str, int]], rank: int) -> tuple[Place, Place]:
    """Of dense tensors and of experts."""
    sizes = dict(axes)
    vpp = sizes.pop("vpp", 1)
    ranks = [(name, size) for name, size in axes if name != "vpp"]
    folded = "ep" in sizes or "etp" in sizes
    etp = sizes.get("etp", sizes.get("tp", 1) if scheme == "megatron" else 1)
    inner = ("fsdp", "zero3", "tp", "ep", "etp")
    num_dense = prod(sizes.get(name, 1) for name in ("fsdp", "zero3", "tp"))
    num_expert = sizes.get("ep", 1) * etp
    block = max(num_dense, num_expert)
    if folded:
        first = min(i for i, (name, _) in enumerate(ranks) if name in inner)
        outer = [axis for axis in ranks if axis[0] not in inner]
        ranks = [*outer[:first], ("block", block), *outer[first:]]
    at = coordinates(ranks, rank)
    stage = (at.get("pp", 0), sizes.get("pp", 1))
    flat = "zero3" in sizes
    within = at
    if folded:
        order = [axis for axis in axes if axis[0] in ("fsdp", "zero3", "tp")]
        within = coordinates(order, at["block"] % num_dense)
    num_chunks = sizes.get("zero3", sizes.get("fsdp", 1))
    chunk = (within.get("zero3", within.get("fsdp", 0)), num_chunks)
    dense = Place(stage, vpp, (within.get("tp", 0), sizes.get("tp", 1)), chunk, flat)
    if not folded:
        return dense, dense
    order = [axis for axis in axes if axis[0] in ("ep", "etp")]
    order += [] if "etp" in sizes else [("etp", etp)]
    within = coordinates(order, at["block"] % num_expert)
    rest = (at["block"] // num_expert, block // num_expert)
    has_chunks = "fsdp" in sizes or "zero3" in sizes
    expert = Place(
        stage,
        vpp,
        (within["etp"], etp),
        rest if has_chunks else (0, 1),
        flat,
        (within.get("ep", 0), sizes.get("ep", 1)),
    )
    return dense, expert


def coordinates(axes: list[tuple[str, int]], rank: int) -> dict[str, int]:
    found = {}
    for name, size in reversed(axes):
        found[name] = rank % size
        rank //= size
    return found


def layer_of(model: CanonicalModel, name: str) -> int:
    match = re.search(r"layers\.(\d+)\.", name)
    return int(match[1]) if match else -1 if "embed" in name else model.num_layers


def expert_of(name: str) -> int:
    match = re.search(r"\.experts\.(\d+)\.", name)
    return int(match[1]) if match else 0


def stage_of(model: CanonicalModel, name: str, place: Place) -> int:
    layer, (_, num_stages) = layer_of(model, name), place.stage
    if layer < 0 or layer == model.num_layers:
        return 0 if layer < 0 else num_stages - 1
    size = -(-model.num_layers // (num_stages * place.vpp))
    return layer // size % num_stages


def has_expert(model: CanonicalModel, name: str, place: Place) -> bool:
    index, parts = place.ep
    return (
        ".experts." not in name or expert_of(name) // -(-model.sizes["experts"] // parts) == index
    )


@dataclass(frozen=True)
class Parts:
    """What a rank has of each full tensor."""

    model: CanonicalModel
    full: Mapping[str, Any]
    dense: Place
    expert: Place

    def place(self, name: str) -> Place:
        return self.expert if ".experts." in name else self.dense

    def of(self, name: str) -> Any:
        """What tp leaves of it."""
        tensor, (index, parts) = self.full[name], self.place(name).tp
        weight = self.full.get(name.removesuffix("_scale_inv"), tensor)
        module = re.sub(r"\.(lora_[AB]\.)?(weight|bias|weight_scale_inv)$", "", name).split(".")[-1]
        by_rows = module in BY_ROWS + BY_HEADS
        dim = 0 if by_rows else 1
        is_whole = (
            (module not in BY_ROWS + BY_COLUMNS + BY_HEADS)
            or (by_rows and "lora_A" in name)
            or (not by_rows and ("lora_B" in name or name.endswith("bias")))
        )
        if is_whole:
            return tensor
        n = weight.shape[dim]
        size = -(-n // parts)
        lo, hi = min(index * size, n), min(index * size + size, n)
        if module in BY_HEADS:
            heads = kv_heads(index, parts, self.model.num_kv_heads)
            lo, hi = heads[0] * self.model.head_dim, (heads[-1] + 1) * self.model.head_dim
        block = BLOCK if name.endswith("_scale_inv") else 1
        touched = range(lo // block, -(-hi // block)) if lo < hi else []
        return np.take(tensor, touched, dim)

    def chunk(self, name: str, tensor: Any) -> Any:
        """What fsdp or zero3 leaves of that."""
        place = self.place(name)
        if place.flat:
            tensor = tensor.reshape(-1)
        index, parts = place.chunk
        size = -(-tensor.shape[0] // parts)
        return tensor[index * size : (index + 1) * size]


def kv_heads(index: int, parts: int, num_kv_heads: int) -> list[int]:
    if parts >= num_kv_heads:
        return [index // (parts // num_kv_heads)]
    each = num_kv_heads // parts
    return list(range(index * each, (index + 1) * each))


def engine(model: CanonicalModel, own: Arrays, part: Parts) -> Arrays:
    local: Arrays = {}
    mla = "kv" not in model.units
    for name in own:
        if ".experts." in name:
            continue
        if not mla and re.search(r"\.[qkv]_proj\.", name):
            names = [re.sub(r"\.[qkv]_proj\.", f".{kind}_proj.", name) for kind in "qkv"]
            fused = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
        elif re.search(r"\.(gate|up)_proj\.", name):
            names = [re.sub(r"\.(gate|up)_proj\.", f".{k}_proj.", name) for k in ("gate", "up")]
            fused = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name)
        elif "q_latent" in model.units and re.search(r"\.(q_a_proj|kv_a_proj_with_mqa)\.", name):
            both = ("q_a_proj", "kv_a_proj_with_mqa")
            names = [re.sub(r"\.(q_a_proj|kv_a_proj_with_mqa)\.", f".{k}.", name) for k in both]
            fused = re.sub(r"\.(q_a_proj|kv_a_proj_with_mqa)\.", ".fused_qkv_a_proj.", name)
        else:
            names, fused = [name], name
        local[fused] = np.concatenate([part.of(n) for n in names])
        if "embed_tokens" in name or "lm_head" in name:
            rows = -(-model.vocab_size // part.dense.tp[1])
            local[name] = padded(local[name], rows)
    for fused, names in stacked(own).items():
        local[fused] = np.stack([np.concatenate([part.of(n) for n in group]) for group in names])
    return local


def stacked(own: Arrays) -> dict[str, list[list[str]]]:
    """Names of the members of each expert, for each stacked tensor of an engine."""
    found: dict[str, list[list[str]]] = {}
    for name in own:
        if match := re.fullmatch(r"(.*\.experts\.)\d+\.(gate_proj|w1)\.(.*)", name):
            up = {"gate_proj": "up_proj", "w1": "w3"}[match[2]]
            pair = [name, name.replace(f".{match[2]}.", f".{up}.")]
            found.setdefault(f"{match[1]}w13_{match[3]}", []).append(pair)
        elif match := re.fullmatch(r"(.*\.experts\.)\d+\.(down_proj|w2)\.(.*)", name):
            found.setdefault(f"{match[1]}w2_{match[3]}", []).append([name])
    return found


def padded(tensor: Any, rows: int) -> Any:
    empty = np.zeros((rows - len(tensor), *tensor.shape[1:]), tensor.dtype)
    return np.concatenate([tensor, empty])


def megatron(model: CanonicalModel, own: Arrays, part: Parts) -> Arrays:
    local: Arrays = {}
    layers = sorted({layer_of(model, n) for n in own} - {-1, model.num_layers})
    experts = sorted({expert_of(n) for n in own if ".experts." in n})
    for name in own:
        prefix, rest = "", name
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name):
            prefix, rest = f"decoder.layers.{layers.index(int(match[1]))}.", match[2]
        before = name.removesuffix(rest)
        if match := re.search(r"\.experts\.(\d+)\.(gate_proj|w1|down_proj|w2)\.", name):
            number = experts.index(int(match[1]))
            is_first = match[2] in ("gate_proj", "w1")
            up = name.replace("gate_proj", "up_proj").replace(".w1.", ".w3.")
            rows = [part.of(name), part.of(up)] if is_first else [part.of(name)]
            linear = "linear_fc1" if is_first else "linear_fc2"
            local[f"{prefix}mlp.experts.{linear}.weight{number}"] = np.concatenate(rows)
        elif ".experts." in name or ".up_proj." in name or re.search(r"\.[kv]_proj\.", name):
            continue
        elif ".gate_proj." in name:
            up = name.replace("gate_proj", "up_proj")
            fused = prefix + rest.replace("gate_proj", "linear_fc1")
            local[fused] = np.concatenate([part.of(name), part.of(up)])
        elif ".q_proj." in name and "kv" in model.units:
            fused = prefix + rest.replace("self_attn.q_proj", "self_attention.linear_qkv")
            local[fused] = linear_qkv(
                model, part, [name.replace("q_proj", f"{k}_proj") for k in "qkv"]
            )
        elif "embed_tokens" in name or "lm_head" in name:
            local[RENAMED[name]] = vocab(model, part, name)
        else:
            local[prefix + renamed(own, before, rest)] = part.of(name)
    last = part.dense.stage[0] == part.dense.stage[1] - 1
    if model.tied and part.dense.stage[1] > 1 and last:
        local["output_layer.weight"] = vocab(model, part, "model.embed_tokens.weight")
    return local


RENAMED = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "lm_head.weight": "output_layer.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "self_attn.q_proj.weight": "self_attention.linear_q_proj.weight",
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.down_proj.bias": "mlp.linear_fc2.bias",
    "mlp.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "block_sparse_moe.gate.weight": "mlp.router.weight",
}


def renamed(own: Arrays, before: str, rest: str) -> str:
    if rest == "input_layernorm.weight":
        mla = f"{before}self_attn.kv_b_proj.weight" in own
        return rest if mla else "self_attention.linear_qkv.layer_norm_weight"
    if rest == "post_attention_layernorm.weight":
        is_dense = f"{before}mlp.gate_proj.weight" in own
        return "mlp.linear_fc1.layer_norm_weight" if is_dense else "pre_mlp_layernorm.weight"
    return RENAMED[rest]


def linear_qkv(model: CanonicalModel, part: Parts, names: list[str]) -> Any:
    """All groups one after the other, then this rank's share of the rows."""
    q, k, v = (part.full[name] for name in names)
    per_group = len(q) // model.num_kv_heads
    rows: list[Any] = []
    for g in range(model.num_kv_heads):
        heads = slice(g * model.head_dim, (g + 1) * model.head_dim)
        rows += [q[g * per_group : (g + 1) * per_group], k[heads], v[heads]]
    fused = np.concatenate(rows)
    index, parts = part.dense.tp
    return fused[index * (len(fused) // parts) : (index + 1) * (len(fused) // parts)]


def vocab(model: CanonicalModel, part: Parts, name: str) -> Any:
    index, parts = part.dense.tp
    rows = -(-model.vocab_size // (128 * parts)) * 128
    return padded(part.full[name], rows * parts)[index * rows : (index + 1) * rows]
