"""Small models, filled tensors and expected tensors for the executors' tests."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardloop.families import CanonicalModel, canonical_model
from shardloop.layout import Layout, box_of, make_layout
from shardloop.transport.buckets import torch_dtype

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 49,
    "tie_word_embeddings": False,
}
"""49 rows: neither 2, 3 nor 4 ranks share them evenly, so shards are uneven and engines pad."""


def small_model(**changes: Any) -> CanonicalModel:
    return canonical_model({**CONFIG, **changes})


def random_state(model: CanonicalModel, *, seed: int = 0) -> dict[str, Tensor]:
    """Canonical float32 tensors that differ in every element."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator)
        for name, shape in model.tensor_shapes().items()
    }


def cut(
    layout: Layout, rank: int, state: Mapping[str, Tensor], *, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The local tensors of a rank: what a transfer must produce; padding is 0."""
    local = empty(layout, rank, dtype=dtype)
    for piece in layout.pieces(rank):
        source = box_of(state[piece.name], piece.box)
        piece.of(local).copy_(source)
    return local


def empty(layout: Layout, rank: int, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Zeros, in the dtype that the model declares for a tensor, else in `dtype`."""
    declared = layout.local_dtypes(rank)
    return {
        name: torch.zeros(
            shape, dtype=dtype if declared[name] is None else torch_dtype(declared[name])
        )
        for name, shape in layout.local_shapes(rank).items()
    }


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Bit for bit, all names."""
    assert actual.keys() == expected.keys()
    wrong = [name for name in expected if not _same_bits(actual[name], expected[name])]
    assert not wrong, f"{len(wrong)} tensors differ: {wrong}"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    bits = [t.contiguous().flatten().view(torch.uint8) for t in (a, b)]
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(*bits)


def error_of(call: Callable[[], Any]) -> tuple[str, str] | None:
    """Class and message of the error that `call` raises, or None."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def layouts(src: str, dst: str, **changes: Any) -> tuple[Layout, Layout]:
    model = small_model(**changes)
    return make_layout(model, src), make_layout(model, dst)


def shared_mappings() -> int:
    """How many segments of shared memory this process has mapped or open."""
    maps = Path("/proc/self/maps").read_text().count("memfd:shardloop")
    files = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return maps + sum("memfd:shardloop" in file for file in files)
