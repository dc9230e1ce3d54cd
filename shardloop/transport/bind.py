"""Binds a layout to live tensors: do they have the names, shapes and dtypes it declares? Floor 3.

A proof speaks of declared layouts; this check ties the declaration to what is really in memory.
Called by the executors on every rank before the first byte moves.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import torch

from shardloop.dtypes import torch_dtype
from shardloop.errors import PlanError
from shardloop.layout import Layout
from shardloop.layout.fit import shape_faults

Strides = Literal["contiguous", "any"]


def check_bound(
    layout: Layout,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    strides: Strides = "contiguous",
) -> None:
    """Compare the local tensors of layout rank `rank` with what `layout` declares for it.

    Args:
        rank: position within the layout (0 .. world_size - 1), not the global rank.
        tensors: local tensors by local name. A declared shard without elements may be left out.
        dtype: the dtype that all must have whose dtype the model does not declare; None accepts
            any floating-point dtype. A declared dtype goes before either: the tensor must have it,
            but where `dtype` is None and it has more than 8 bits (8 bits mean nothing without
            their scales, so nothing is converted to them).
        strides: "contiguous" refuses any other; "any" accepts all (a source is packed by copy).
    Raises:
        PlanError: naming every missing, unexpected and misfitting tensor, not just the first.
    """
    shapes, declared = layout.local_shapes(rank), layout.local_dtypes(rank)
    faults = list(_faults(shapes, declared, tensors, dtype=dtype, strides=strides))
    if faults:
        listed = "\n  ".join(faults)
        raise PlanError(
            f"the tensors of rank {rank} do not fit layout {layout.spec!r} "
            f"({len(faults)} faults):\n  {listed}\n"
            "pass the local tensors of this layout, or declare the layout that they really have"
        )


def _faults(
    shapes: Mapping[str, tuple[int, ...]],
    declared: Mapping[str, str | None],
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype | None,
    strides: Strides,
) -> Iterator[str]:
    yield from shape_faults(shapes, tensors)
    for name, tensor in tensors.items():
        if name not in shapes:
            continue
        wanted = _wanted_dtype(declared[name], dtype)
        if wanted is None and not tensor.is_floating_point():
            yield f"dtype of {name} is {tensor.dtype}, it must be a floating-point dtype"
        if wanted is not None and tensor.dtype != wanted:
            yield f"dtype of {name} is {tensor.dtype}, it must be {wanted}"
        if strides == "contiguous" and not tensor.is_contiguous():
            yield f"strides of {name} are {tensor.stride()}: it must be contiguous"


def _wanted_dtype(declared: str | None, dtype: torch.dtype | None) -> torch.dtype | None:
    if declared is None:
        return dtype
    wanted = torch_dtype(declared)
    return None if dtype is None and wanted.itemsize > 1 else wanted
