"""Model folders of every kind with random weights, and checkpoints as other programs write them."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardloop.convert.sources import model_of

GROUPED = {
    "vocab_size": 10,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 64,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "tied q/k norms": {**GROUPED, "model_type": "qwen3", "tie_word_embeddings": True},
    "biases": {**GROUPED, "model_type": "qwen2", "tie_word_embeddings": False},
    "all biases": {
        **GROUPED,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {
        **GROUPED,
        **EXPERTS,
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
    },
    "mixtral": {
        **GROUPED,
        "num_local_experts": 4,
        "model_type": "mixtral",
        "tie_word_embeddings": False,
    },
}
"""By what is special about the model."""
FP8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}


def random_weights(
    config: dict[str, Any], *, dtype: torch.dtype, seed: int = 0
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = model_of(config)
    weights = {}
    for name, shape in model.tensor_shapes().items():
        weights[name] = torch.randn(shape, generator=generator).to(dtype)
    for c in model.classes:
        if c.dtype is not None:
            names = [c.name(i, e) for i in range(*c.layers) for e in range(*c.experts)]
            weights |= {n: weights[n].float().to(getattr(torch, c.dtype)) for n in names}
    return weights


def make_model(
    folder: Path, kind: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> dict[str, Tensor]:
    """Write a folder in Hugging Face format with safetensors' own writer; returns its weights."""
    folder.mkdir()
    config = {**CONFIGS[kind], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    weights = random_weights(config, dtype=dtype, seed=seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors, by safetensors' own reader."""
    found: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        part = load_file(file)
        assert not found.keys() & part.keys()
        found |= part
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Equal names, dtypes and bits."""
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype
        and torch.equal(
            one[n].contiguous().view(torch.uint8), other[n].contiguous().view(torch.uint8)
        )
        for n in one
    )


def write_zero3(
    folder: Path,
    weights: dict[str, Tensor],
    *,
    num_ranks: int,
    num_groups: int = 2,
    frozen: tuple[str, ...] = (),
    buffers: tuple[str, ...] = (),
) -> None:
    """What DeepSpeed's ZeRO-3 leaves of float32 weights, written rank by rank in the obvious way:
    every tensor padded with NaN up to a multiple of the ranks."""
    folder.mkdir()
    trained = [n for n in weights if n not in (*frozen, *buffers)]
    groups = [trained[i::num_groups] for i in range(num_groups)]

    def chunk(name: str, rank: int) -> Tensor:
        flat = weights[name].flatten()
        size = -(-len(flat) // num_ranks)
        padding = torch.full((size * num_ranks - len(flat),), torch.nan)
        return torch.cat([flat, padding])[rank * size : (rank + 1) * size]

    shapes = [OrderedDict((n, weights[n].shape) for n in group) for group in groups]
    for rank in range(num_ranks):
        stem = f"zero_pp_rank_{rank}_mp_rank_00"
        states = {
            "module": {name: weights[name] for name in buffers},
            "buffer_names": list(buffers),
            "param_shapes": shapes,
            "frozen_param_shapes": OrderedDict((n, weights[n].shape) for n in frozen) or None,
            "frozen_param_fragments": {n: chunk(n, rank) for n in frozen} or None,
            "shared_params": {"lm_head.weight": "model.embed_tokens.weight"},
            "ds_version": "0.17.0",
            "global_steps": 7,
        }
        torch.save(states, folder / f"{stem}_model_states.pt")
        optim = {
            "zero_stage": 3,
            "partition_count": num_ranks,
            "fp32_flat_groups": [
                torch.cat([chunk(name, rank) for name in group]) for group in groups
            ],
        }
        file = folder / f"bf16_{stem}_optim_states.pt"
        torch.save({"optimizer_state_dict": optim, "ds_version": "0.17.0"}, file)
