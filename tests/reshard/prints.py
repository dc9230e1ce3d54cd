"""A small model cut by any layout, and its fingerprints. Called by the tests of fingerprints."""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardloop.layout import Layout
from shardloop.reshard.copies import find_copies
from shardloop.reshard.fingerprint import local_fingerprints
from tests.transport.live import cut, small_model

MODEL = small_model()
NAMES = tuple(sorted(MODEL.tensor_shapes()))
NORM = "model.norm.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
Shards = list[dict[str, Tensor]]


def shards_of(layout: Layout, state: Mapping[str, Tensor], dtype: torch.dtype) -> Shards:
    return [cut(layout, rank, state, dtype=dtype) for rank in range(layout.world_size)]


def fingerprints(layout: Layout, shards: Shards, dtype: torch.dtype = torch.float32) -> Tensor:
    copies = find_copies(layout)
    parts = [
        local_fingerprints(copies, rank, tensors, dtype=dtype)
        for rank, tensors in enumerate(shards)
    ]
    return torch.stack(parts).sum(0)
