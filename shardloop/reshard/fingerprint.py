"""Fingerprints of sharded weights: equal on both sides of a transfer, without a gather. Floor 1.

The fingerprint of a canonical tensor is, modulo 2**64,

    F = sum over its elements x of  mix(bits(x)) * w_0(i_0) * w_1(i_1) * ...

with i the global index of x and w_d odd weights hashed from a coordinate. Integer sums do not
depend on their order, so each rank sums its own pieces and one SUM all-reduce gives F, however the
tensor is cut.

What it sees:

    one changed element       always: mix is one to one, and an odd factor is invertible mod 2**64
    any other difference      but for chance: changes d of mix(bits) escape only if the sum of their
                              d * w is 0 mod 2**64, with weights that know nothing of the values

mix makes that chance small for what numbers share. Without it a change of sign in float64 is
2**63, which times an odd weight is 2**63 again, and two of them cancel whatever the weights.

Elements that a layout holds more than once (replicas, repeated kv heads) have copies 0 .. m-1, m
differing from box to box. With M the greatest m there are fingerprints F_0 .. F_{M-1}; F_k takes
copy k mod m of each box. Each is a fingerprint of the whole tensor, each copy is in one at least,
and all must be equal: what is said above holds for every copy.

Called by `shardloop.weight_sync` after each transfer; `reshard.gather` asks who is copy 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardloop.errors import FingerprintError, PlanError
from shardloop.layout import Box, Layout, Piece, box_of
from shardloop.splitmix import splitmix64

MASK = 2**64 - 1
FACTOR = 0x5851F42D4C957F2D
"""Odd, with bits in every place (the multiplier of Knuth's MMIX generator)."""
BLOCK = 1 << 16
"""Elements widened to int64 at a time: few enough for a CPU cache."""
NO_KEY = torch.tensor(0)
INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Copy(NamedTuple):
    """Which of the copies of its box a piece is."""

    ordinal: int
    number: int
    """How many copies of this box there are."""


@dataclass(frozen=True)
class Copies:
    """Who holds each box of a layout: the order of the holders numbers the copies."""

    names: tuple[str, ...]
    """Canonical tensor names, sorted: the order of every vector of fingerprints."""
    holders: Mapping[tuple[str, Box], tuple[tuple[int, str], ...]]
    """(canonical name, box) -> the (rank, local name) of every copy, by rank."""

    @cached_property
    def most(self) -> int:
        """Copies of the box that has most of them: the number of fingerprints of each tensor."""
        return max(len(holders) for holders in self.holders.values())

    def of(self, piece: Piece) -> Copy:
        holders = self.holders[piece.name, piece.box]
        return Copy(holders.index((piece.rank, piece.local_name)), len(holders))


def find_copies(layout: Layout) -> Copies:
    """Number the copies of every element of `layout`.

    It walks the pieces of all ranks: call it once and keep it.

    Raises:
        PlanError: the boxes of a tensor do not cover it exactly once (equal boxes count as one).
    """
    holders: dict[tuple[str, Box], list[tuple[int, str]]] = {}
    for rank in range(layout.world_size):
        for piece in layout.pieces(rank):
            holders.setdefault((piece.name, piece.box), []).append((rank, piece.local_name))
    shapes = layout.model.tensor_shapes()
    boxes: dict[str, list[Box]] = {name: [] for name in shapes}
    for name, box in holders:
        boxes[name].append(box)
    uneven = [name for name, shape in shapes.items() if not _tile(boxes[name], shape)]
    if uneven:
        raise PlanError(
            f"layout {layout.spec!r} has no fingerprint: the boxes of {uneven} do not tile these "
            "tensors; every element must lie in exactly one box (with any number of holders)"
        )
    return Copies(tuple(sorted(shapes)), {key: tuple(ranks) for key, ranks in holders.items()})


def _tile(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """Whether each element of `shape` lies in exactly one box: counted on the grid of all ends."""
    ends = [sorted({end for box in boxes for end in box[dim]}) for dim in range(len(shape))]
    if [(*end[:1], *end[-1:]) for end in ends] != [(0, size) for size in shape]:
        return False
    places = [{end: place for place, end in enumerate(of_dim)} for of_dim in ends]
    count = np.zeros([len(of_dim) - 1 for of_dim in ends], dtype=np.int64)
    for box in boxes:
        runs = zip(places, box, strict=True)
        count[tuple(slice(place[lo], place[hi]) for place, (lo, hi) in runs)] += 1
    return bool((count == 1).all())


def local_fingerprints(
    layout: Layout,
    rank: int,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    copies: Copies,
) -> Tensor:
    """This rank's share of every F_k; the wrapping sum over the ranks of the layout gives them.

    Args:
        rank: position within the layout.
        tensors: local tensors by local name, on any device.
        dtype: bits are taken after conversion to it, so that a float32 trainer and a bfloat16
            engine can agree.
        copies: `find_copies(layout)`.
    Returns:
        int64 [copies.most, number of canonical tensors] on the CPU: row k is F_k.
    """
    column = {name: i for i, name in enumerate(copies.names)}
    sums = [[0] * len(copies.names) for _ in range(copies.most)]
    for piece in layout.pieces(rank):
        ordinal, number = copies.of(piece)
        value = _piece_sum(piece, tensors[piece.local_name], dtype)
        for row in sums[ordinal::number]:
            row[column[piece.name]] += value
    return torch.tensor([[_signed(value) for value in row] for row in sums], dtype=torch.int64)


def check_fingerprints(names: Sequence[str], src: Tensor, dst: Tensor) -> None:
    """Compare the fingerprints of two layouts that should hold the same model.

    Args:
        names: canonical names in the order of the columns.
        src, dst: int64 [copies.most of that side, len(names)], summed over all its ranks.
    Raises:
        FingerprintError: naming every tensor whose copies disagree within a side, or that differs
            between the sides.
    """
    faults = {
        "copies within the source disagree": (src != src[0]).any(0),
        "copies within the destination disagree": (dst != dst[0]).any(0),
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
            block = values[i : i + num_rows, j : j + BLOCK].to(dtype)
            # A copy even of 8-byte values: mixing is in place, and they are the live weights.
            bits = block.view(INT_OF_SIZE[dtype.itemsize]).to(torch.int64, copy=True)
            row_sums = _mix(bits).mul_(col_weights[j : j + BLOCK]).sum(1)
            total += (row_sums * row_weights[i : i + num_rows]).sum()
    return int(total)


def _mix(bits: Tensor) -> Tensor:
    """One to one on 64 bits: high bits come down, all go up, and what went up comes down again.

    Each step has an inverse: folding is its own, and the factor is odd. Changes `bits`.
    """
    return _fold(_fold(bits).mul_(FACTOR))


def _fold(bits: Tensor) -> Tensor:
    high = bits >> 32
    return bits.bitwise_xor_(high.bitwise_and_(2**32 - 1))  # `>>` repeats the sign


def _weights(dim: int, lo: int, hi: int) -> Tensor:
    """Odd int64 weights of coordinates lo .. hi-1 of a dim."""
    return splitmix64(NO_KEY, torch.arange(lo, hi) + ((dim + 1) << 48)) | 1


def _signed(value: int) -> int:
    value &= MASK
    return value - 2**64 if value >= 2**63 else value
