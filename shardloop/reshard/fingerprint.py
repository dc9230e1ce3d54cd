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
2**63, which times an odd weight is 2**63 again, and two of them cancel whatever the weights. Every
bit of a number reaches one of the lowest 16 of mix, so d is no multiple of 2**16, and two changes
cancel with a chance of about 2**-48.

An element that a layout holds m times has copies 0 .. m-1, m differing from box to box. There are
three fingerprints, for any m:

    F_0   takes copy 0 of each element
    F_1   the same, and of the pairs of copies (0, 1), (2, 3), ... the difference x an odd factor
    F_2   the same, and of the pairs (1, 2), (3, 4), ...

All three are equal when all copies are: each copy is compared with the next, and copy 0 with the
other side. Each copy has an odd factor in F_1 or F_2, so one changed element in one copy is always
seen within its side, even if the other side holds the same mixture. A tensor that several local
tensors have whole (tied ones) has three fingerprints for each of them.

Called by `shardloop.weight_sync` after each transfer.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from shardloop.dtypes import torch_dtype
from shardloop.errors import FingerprintError
from shardloop.layout import Box
from shardloop.reshard.copies import Copies, Copy
from shardloop.splitmix import splitmix64

MASK = 2**64 - 1
NUM_PRINTS = 3
"""For each of the local tensors that have the same canonical tensor."""
BLOCK = 1 << 16
"""Elements widened to int64 at a time: few enough for a CPU cache."""
NO_KEY = torch.tensor(0)
INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FOLDS = {1: (), 2: (), 4: (16,), 8: (32, 16)}
"""By bytes of an element: how far high bits come down, one step after the other."""
PAIRS = 1 << 14
"""Where the dims of weights would be, for the factors of pairs."""


class Sliceable(Protocol):
    """A local tensor, in memory or still in its file."""

    def __getitem__(self, slices: tuple[slice | int, ...], /) -> Tensor: ...


def num_prints(copies: Copies) -> int:
    """Rows of `local_fingerprints`: few, and the same for any number of ranks."""
    return NUM_PRINTS * copies.most_sources


def local_fingerprints(
    copies: Copies, rank: int, tensors: Mapping[str, Sliceable], *, dtype: torch.dtype
) -> Tensor:
    """This rank's share of every fingerprint; the wrapping sum over all ranks gives them.

    Args:
        copies: `find_copies` of the layout.
        rank: position within the layout.
        tensors: local tensors by local name, on any device.
        dtype: bits are taken after conversion to it, so that a float32 trainer and a bfloat16
            engine can agree; those of a class that has a dtype of its own, in that.
    Returns:
        int64 [num_prints(copies), number of canonical tensors] on the CPU: row k is F_k.
    """
    column = {name: i for i, name in enumerate(copies.names)}
    sums = [[0] * len(copies.names) for _ in range(num_prints(copies))]
    for copy in copies.of(rank):
        own = copy.tensor_class.dtype
        wire = dtype if own is None else torch_dtype(own)
        value = _piece_sum(copy.box, copy.view.of(tensors).detach(), wire)
        place = column[copy.tensor_class.name(copy.layer, copy.expert)]
        for source in range(copy.source, copies.most_sources, copy.num_sources):
            for row, factor in enumerate(_factors(copy)):
                sums[NUM_PRINTS * source + row][place] += factor * value
    return torch.tensor([[_signed(value) for value in row] for row in sums], dtype=torch.int64)


def _factors(copy: Copy) -> tuple[int, int, int]:
    """Of this copy in F_0, F_1 and F_2."""
    first = int(copy.ordinal == 0)
    return first, first + _in_pairs(copy, 0), first + _in_pairs(copy, 1)


def _in_pairs(copy: Copy, start: int) -> int:
    """Factor of a copy in the differences of the pairs (start, start + 1), ...; 0 without one."""
    pair, is_second = divmod(copy.ordinal - start, 2)
    has_partner = copy.ordinal >= start and (is_second or copy.ordinal + 1 < copy.number)
    sign = -1 if is_second else 1
    return sign * _pair_factor(start, pair) if has_partner else 0


@lru_cache(maxsize=4096)
def _pair_factor(start: int, pair: int) -> int:
    return int(_weights(PAIRS + start, pair, pair + 1))


def check_fingerprints(names: Sequence[str], src: Tensor, dst: Tensor) -> None:
    """Compare the fingerprints of two layouts that should hold the same model.

    Args:
        names: canonical names in the order of the columns.
        src, dst: int64 [prints of that side, len(names)], summed over all its ranks.
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


def _piece_sum(box: Box, values: Tensor, dtype: torch.dtype) -> int:
    weights = [_weights(dim, lo, hi).to(values.device) for dim, (lo, hi) in enumerate(box)]
    return _weighted_sum(values, weights, dtype)


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
            bits = _mix(block.view(INT_OF_SIZE[dtype.itemsize])).to(torch.int64)
            row_sums = _times(bits, col_weights[j : j + BLOCK])
            total += _times(row_sums[None], row_weights[i : i + num_rows])[0]
    return int(total)


def _times(rows: Tensor, weights: Tensor) -> Tensor:
    """Wrapping sum of each row x weights. On a CPU `mv` needs one pass; GPUs have none of int64."""
    return torch.mv(rows, weights) if rows.device.type == "cpu" else (rows * weights).sum(1)


def _mix(bits: Tensor) -> Tensor:
    """One to one on integers of any size: high bits are folded onto low ones.

    A step x ^ (x >> n), shifting in zeros, has an inverse. `bits` are those of live weights, and
    stay as they are.
    """
    size = 8 * bits.element_size()
    for shift in FOLDS[bits.element_size()]:
        high = (bits >> shift).bitwise_and_(2 ** (size - shift) - 1)  # `>>` repeats the sign
        bits = high.bitwise_xor_(bits)
    return bits


@lru_cache(maxsize=8)
def _weights(dim: int, lo: int, hi: int) -> Tensor:
    """Odd int64 weights of coordinates lo .. hi-1 of a dim; the same for many layers in turn."""
    return splitmix64(NO_KEY, torch.arange(lo, hi) + ((dim + 1) << 48)) | 1


def _signed(value: int) -> int:
    value &= MASK
    return value - 2**64 if value >= 2**63 else value
