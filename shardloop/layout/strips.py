"""Strips: what lies along one dim of a local tensor, for every part at once. Floor 1.

Called by the schemes. A strip is a sequence of segments; a segment is a box of a class's
elements read row by row, or padding. `Strips` holds one strip for each of several parts. A few
small functions write every layout: whole, cat, pad, split, pick, clip, flat, blocks.

    split(whole(OWN, (0, 20)), 8)          3 3 3 3 3 3 2 0 rows, as torch.chunk cuts them
    split(whole(OWN, (0, 4), (0, 3)), 5)   a flat partition: 3 3 3 3 0 elements, of 4 rows of 3
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]

OWN = "*"
"""Key of the local tensor's own class, where the dim does not say which of several it is."""
PADDING = -1


def read_only(array: Ints) -> Ints:
    """The same array, which no one can write to by this name any more."""
    array.flags.writeable = False
    return array


@dataclass(frozen=True, eq=False)
class Strips:
    """Segments of all parts, part by part and in order; arrays are read-only."""

    num_parts: int
    keys: tuple[str, ...]
    """Keys of tensor classes, or OWN: what `key` counts."""
    part: Ints
    key: Ints
    """Index into `keys`, or PADDING."""
    lo: Ints
    """[segments, dims covered]: the first corner of the box; 0 for padding."""
    hi: Ints
    """One past its last corner; (1, ..., 1, n) for n elements of padding."""

    def __post_init__(self) -> None:
        for array in (self.part, self.key, self.lo, self.hi):
            read_only(array)

    @property
    def num_dims(self) -> int:
        return int(self.lo.shape[1])

    @cached_property
    def size(self) -> Ints:
        """Elements of each segment."""
        return read_only(np.prod(self.hi - self.lo, axis=1))

    @cached_property
    def start(self) -> Ints:
        """Index of each part's first segment, and the number of all at the end."""
        return read_only(np.searchsorted(self.part, np.arange(self.num_parts + 1)))

    @cached_property
    def loc(self) -> Ints:
        """Where each segment starts in the local dim of its part."""
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.size)])
        return read_only(ends[:-1] - ends[self.start[self.part]])

    @cached_property
    def length(self) -> Ints:
        """Elements of each part, padding included."""
        ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self.size)])
        return read_only(ends[self.start[1:]] - ends[self.start[:-1]])

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal content, in any process."""
        columns = (self.part, self.key, self.lo, self.hi)
        text = repr((self.num_parts, self.keys, self.lo.shape)).encode()
        return sha256(text + b"".join(column.tobytes() for column in columns)).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strips) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return Strips, (self.num_parts, self.keys, self.part, self.key, self.lo, self.hi)


def whole(key: str, *runs: tuple[int, int]) -> Strips:
    """One part that has all of a box; a box without elements is no segment."""
    corners = np.array(runs, dtype=np.int64).reshape(1, -1, 2)
    kept = corners[(corners[..., 1] > corners[..., 0]).all(axis=1)]
    zeros = np.zeros(len(kept), dtype=np.int64)
    return Strips(1, (key,), zeros, zeros.copy(), kept[..., 0].copy(), kept[..., 1].copy())


def cat(*strips: Strips) -> Strips:
    """Part by part, one after the other. All have as many parts and cover as many dims."""
    first = strips[0]
    keys = tuple(dict.fromkeys(key for strip in strips for key in strip.keys))
    code = {key: number for number, key in enumerate(keys)}
    renamed = [
        np.array([*(code[key] for key in strip.keys), PADDING], dtype=np.int64)[strip.key]
        for strip in strips
    ]
    part = np.concatenate([strip.part for strip in strips])
    order = np.argsort(part, kind="stable")
    return Strips(
        first.num_parts,
        keys,
        part[order],
        np.concatenate(renamed)[order],
        np.concatenate([strip.lo for strip in strips])[order],
        np.concatenate([strip.hi for strip in strips])[order],
    )


def pad(strips: Strips, size: int) -> Strips:
    """Every part with padding at its end, up to `size` elements."""
    return cat(strips, _padding(size - strips.length, strips.num_dims))


def split(strips: Strips, num_parts: int) -> Strips:
    """Every part in `num_parts` chunks of ceil(n / num_parts): the last ones may be short or empty.

    Chunk c of part p is part p * num_parts + c of the result. A box that a chunk ends in becomes at
    most 2 * dims - 1 boxes on either side.
    """
    chunk = -(-strips.length // num_parts)  # elements in each chunk, by part
    chunk = np.maximum(chunk, 1)[strips.part]
    end = strips.loc + strips.size
    first, last = strips.loc // chunk, -(-end // chunk)
    segment, which = expand(first, last)
    start = np.maximum(which * chunk[segment], strips.loc[segment]) - strips.loc[segment]
    stop = np.minimum((which + 1) * chunk[segment], end[segment]) - strips.loc[segment]
    part = strips.part[segment] * num_parts + which
    owner, lo, hi = _slabs(strips.lo[segment], strips.hi[segment], start, stop)
    padding = strips.key[segment][owner] == PADDING
    hi[padding] = hi[padding] - lo[padding]
    lo[padding] = 0
    return Strips(
        strips.num_parts * num_parts, strips.keys, part[owner], strips.key[segment][owner], lo, hi
    )


def pick(strips: Strips, order: Sequence[Sequence[int]]) -> Strips:
    """New part i is the old parts `order[i]`, one after the other: copies, merged, interleaved."""
    old = np.array([part for parts in order for part in parts], dtype=np.int64)
    new = np.repeat(np.arange(len(order)), [len(parts) for parts in order])
    which, segment = expand(strips.start[old], strips.start[old + 1])
    return Strips(
        len(order),
        strips.keys,
        new[which],
        strips.key[segment],
        strips.lo[segment],
        strips.hi[segment],
    )


def clip(strips: Strips, lo: int, hi: int) -> Strips:
    """Along one dim, without padding so far: what lies outside lo:hi becomes padding."""
    segment, which = expand(np.zeros_like(strips.part), np.full_like(strips.part, 3))
    ends = np.array([np.iinfo(np.int64).min, lo, hi, np.iinfo(np.int64).max])
    first = np.maximum(strips.lo[segment, 0], ends[which])
    last = np.minimum(strips.hi[segment, 0], ends[which + 1])
    kept = first < last
    segment, first, last, outside = segment[kept], first[kept], last[kept], which[kept] != 1
    key = np.where(outside, PADDING, strips.key[segment])
    last = np.where(outside, last - first, last)[:, None]
    first = np.where(outside, 0, first)[:, None]
    return Strips(strips.num_parts, strips.keys, strips.part[segment], key, first, last)


def blocks(strips: Strips, size: int) -> Strips:
    """Along one dim: the blocks of `size` elements that each segment touches, itself counted so."""
    return Strips(
        strips.num_parts,
        strips.keys,
        strips.part.copy(),
        strips.key.copy(),
        strips.lo // size,
        -(-strips.hi // size),
    )


def flat(*strips: Strips) -> Strips:
    """Part by part, the box of elements along all of these dims, read row by row.

    All have as many parts and keys, with at most one segment in each; a part that has nothing
    along one dim has nothing.
    """
    first = strips[0]
    assert all((np.bincount(s.part, minlength=1) <= 1).all() for s in strips), "one segment a part"
    part = first.part
    for strip in strips[1:]:
        part = np.intersect1d(part, strip.part)
    rows = [np.searchsorted(strip.part, part) for strip in strips]
    return Strips(
        first.num_parts,
        first.keys,
        part.copy(),
        first.key[rows[0]],
        np.concatenate([s.lo[row] for s, row in zip(strips, rows, strict=True)], axis=1),
        np.concatenate([s.hi[row] for s, row in zip(strips, rows, strict=True)], axis=1),
    )


def expand(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """(i, j) for every i and every j in first[i]:last[i]; an empty range gives none."""
    count = np.maximum(last - first, 0)
    index = np.repeat(np.arange(len(count)), count)
    begin = np.cumsum(count) - count
    return index, first[index] + np.arange(len(index)) - begin[index]


def _padding(sizes: Ints, num_dims: int) -> Strips:
    assert (sizes >= 0).all(), f"cannot pad to less than is there: {sizes.min()}"
    part = np.flatnonzero(sizes)
    hi = np.ones((len(part), num_dims), dtype=np.int64)
    hi[:, -1] = sizes[part]
    return Strips(len(sizes), (), part, np.full(len(part), PADDING), np.zeros_like(hi), hi)


def _slabs(lo: Ints, hi: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints, Ints]:
    """Elements start:stop of each box, counted row by row, as boxes in that order.

    Returns:
        Index of the box that each comes from, and its corners.
    """
    num_dims = lo.shape[1]
    if num_dims == 1:
        return np.arange(len(lo)), lo + start[:, None], lo + stop[:, None]
    row = np.prod(hi[:, 1:] - lo[:, 1:], axis=1)
    head_row, tail_row = start // row, stop // row
    full_from, full_to = -(-start // row), tail_row
    inside = full_from > full_to  # begins and ends within one row
    head_stop = np.where(inside, stop, full_from * row)
    found = []
    for order, (at, begin, end) in enumerate(
        ((head_row, start, head_stop), (tail_row, np.where(inside, stop, tail_row * row), stop))
    ):
        some = np.flatnonzero(begin < end)
        owner, inner_lo, inner_hi = _slabs(
            lo[some, 1:], hi[some, 1:], (begin - at * row)[some], (end - at * row)[some]
        )
        outer = (lo[:, 0] + at)[some][owner]
        rank = np.full(len(owner), 2 * order)
        corners = np.c_[outer, inner_lo], np.c_[outer + 1, inner_hi]
        found.append((some[owner], rank, *corners))
    some = np.flatnonzero(full_from < full_to)
    first, last = lo[some].copy(), hi[some].copy()
    last[:, 0] = first[:, 0] + full_to[some]
    first[:, 0] += full_from[some]
    found.append((some, np.ones(len(some), np.int64), first, last))
    owner, rank, first, last = (np.concatenate(columns) for columns in zip(*found, strict=True))
    order_of = np.lexsort((rank, owner))
    return owner[order_of], first[order_of], last[order_of]
