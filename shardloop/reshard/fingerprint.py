"""Fingerprints of sharded weights: equal on both sides of a transfer, without a gather. Floor 1.

The fingerprint of a canonical tensor is, modulo 2**64,

    F = sum over its elements x of  bits(x) * w_0(i_0) * w_1(i_1) * ...

with i the global index of x and w_d odd weights hashed from a coordinate. Integer sums do not
depend on their order, so each rank sums its own pieces and one SUM all-reduce of 8 bytes per tensor
gives F, however the tensor is cut. Odd weights: a change of one element always changes F.

Elements that a layout holds more than once (replicas, repeated kv heads) have copies 0 .. m-1. F
counts copy 0. A second sum D multiplies copy k by a salt s_k, with s_0 + ... + s_{m-1} = 0: it is 0
when the copies agree, for any m, and (up to chance, 2**-60) only then.

Called by `shardloop.weight_sync` after each transfer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardloop.errors import FingerprintError, PlanError
from shardloop.layout import Box, Layout, Piece, box_of
from shardloop.splitmix import splitmix64

MASK = 2**64 - 1
BLOCK = 1 << 16
"""Elements widened to int64 at a time: few enough for a CPU cache."""
NO_KEY = torch.tensor(0)
INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Copies:
    """Who holds each box of a layout: the order of the holders numbers the copies."""

    names: tuple[str, ...]
    """Canonical tensor names, sorted: the order of every vector of fingerprints."""
    holders: Mapping[tuple[str, Box], tuple[tuple[int, str], ...]]
    """(canonical name, box) -> the (rank, local name) of every copy, by rank."""

    def salt(self, piece: Piece) -> tuple[int, bool]:
        """The salt of this copy in D, and whether it is copy 0, the one that F counts."""
        holders = self.holders[piece.name, piece.box]
        ordinal = holders.index((piece.rank, piece.local_name))
        if ordinal:
            return _salt(ordinal), False
        return -sum(_salt(k) for k in range(1, len(holders))), True


def find_copies(layout: Layout) -> Copies:
    """Number the copies of every element of `layout`.

    It walks the pieces of all ranks: call it once and keep it.

    Raises:
        PlanError: boxes of a tensor overlap without being equal, or do not cover it.
    """
    holders: dict[tuple[str, Box], list[tuple[int, str]]] = {}
    for rank in range(layout.world_size):
        for piece in layout.pieces(rank):
            holders.setdefault((piece.name, piece.box), []).append((rank, piece.local_name))
    shapes = layout.model.tensor_shapes()
    covered = dict.fromkeys(shapes, 0)
    for name, box in holders:
        covered[name] += math.prod(hi - lo for lo, hi in box)
    uneven = [name for name, shape in shapes.items() if covered[name] != math.prod(shape)]
    if uneven:
        raise PlanError(
            f"layout {layout.spec!r} has no fingerprint: the boxes of {uneven} do not tile these "
            "tensors; every element must lie in exactly one box (with any number of holders)"
        )
    return Copies(tuple(sorted(shapes)), {key: tuple(ranks) for key, ranks in holders.items()})


def local_fingerprints(
    layout: Layout,
    rank: int,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    copies: Copies,
) -> Tensor:
    """This rank's share of F and D; the wrapping sum over the ranks of the layout gives them.

    Args:
        rank: position within the layout.
        tensors: local tensors by local name, on any device.
        dtype: bits are taken after conversion to it, so that a float32 trainer and a bfloat16
            engine can agree.
        copies: `find_copies(layout)`.
    Returns:
        int64 [2, number of canonical tensors] on the CPU: row 0 is F, row 1 is D.
    """
    column = {name: i for i, name in enumerate(copies.names)}
    sums = [[0] * len(copies.names) for _ in range(2)]
    for piece in layout.pieces(rank):
        salt, first = copies.salt(piece)
        value = _piece_sum(piece, tensors[piece.local_name], dtype)
        sums[0][column[piece.name]] += value if first else 0
        sums[1][column[piece.name]] += salt * value
    return torch.tensor([[_signed(value) for value in row] for row in sums], dtype=torch.int64)


def check_fingerprints(names: Sequence[str], src: Tensor, dst: Tensor) -> None:
    """Compare the fingerprints of two layouts that should hold the same model.

    Args:
        names: canonical names in the order of the columns.
        src, dst: int64 [2, len(names)], summed over all ranks of each side.
    Raises:
        FingerprintError: naming every tensor whose copies disagree within a side, or that differs
            between the sides.
    """
    faults = {
        "copies within the source disagree": src[1] != 0,
        "copies within the destination disagree": dst[1] != 0,
        "source and destination differ": src[0] != dst[0],
    }
    lines = [
        f"{what}: {', '.join(name for name, bad in zip(names, wrong.tolist(), strict=True) if bad)}"
        for what, wrong in faults.items()
        if bool(wrong.any())
    ]
    if lines:
        raise FingerprintError(
            "fingerprints do not match after the transfer; the new weights must not be used\n  "
            + "\n  ".join(lines)
        )


def _piece_sum(piece: Piece, tensor: Tensor, dtype: torch.dtype) -> int:
    weights = [_weights(dim, lo, hi).to(tensor.device) for dim, (lo, hi) in enumerate(piece.box)]
    return _weighted_sum(box_of(tensor.detach(), piece.local_box), weights, dtype)


def _weighted_sum(values: Tensor, weights: Sequence[Tensor], dtype: torch.dtype) -> int:
    if values.dim() > 2:
        rows = zip(values, weights[0].tolist(), strict=True)
        return sum(weight * _weighted_sum(row, weights[1:], dtype) for row, weight in rows)
    one = torch.ones(1, dtype=torch.int64, device=values.device)
    row_weights, col_weights = [one, one, *weights][-2:]
    values = values.reshape(len(row_weights), len(col_weights))
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    num_rows = max(1, BLOCK // max(1, values.shape[1]))
    for i in range(0, values.shape[0], num_rows):
        for j in range(0, values.shape[1], BLOCK):
            bits = (
                values[i : i + num_rows, j : j + BLOCK].to(dtype).view(INT_OF_SIZE[dtype.itemsize])
            )
            row_sums = bits.to(torch.int64).mul_(col_weights[j : j + BLOCK]).sum(1)
            total += (row_sums * row_weights[i : i + num_rows]).sum()
    return int(total)


def _weights(dim: int, lo: int, hi: int) -> Tensor:
    """Odd int64 weights of coordinates lo .. hi-1 of a dim."""
    return splitmix64(NO_KEY, torch.arange(lo, hi) + ((dim + 1) << 48)) | 1


def _salt(ordinal: int) -> int:
    return int(splitmix64(NO_KEY, torch.tensor(ordinal))) | 1


def _signed(value: int) -> int:
    value &= MASK
    return value - 2**64 if value >= 2**63 else value
