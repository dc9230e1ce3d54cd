"""Meshes, cuts and tables: which rank holds what along one dim. Called by `layout` and `reshard`.

Floor 1.

Ranks add: a rank is the sum of coordinate x stride over the mesh axes, and the *part* of a rank in
a cut is that sum over the axes of the cut alone. A table lists, for one class, the rows
(part, lo, hi, loc): ranks of `part` hold lo:hi, and it starts at `loc` of their local dim.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from shardloop.layout.strips import OWN, Strip

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Axis(NamedTuple):
    name: str
    size: int
    stride: int
    """Ranks that differ by 1 on this axis alone are this far apart."""

    def coordinate(self, rank: int) -> int:
        return rank // self.stride % self.size


def make_mesh(axes: tuple[tuple[str, int], ...]) -> tuple[Axis, ...]:
    """Axes with their strides, outermost first: the last axis has stride 1."""
    mesh: list[Axis] = []
    stride = 1
    for name, size in reversed(axes):
        mesh.insert(0, Axis(name, size, stride))
        stride *= size
    return tuple(mesh)


def offsets(axes: tuple[Axis, ...]) -> list[int]:
    """Rank offset of each coordinate of these axes, the last axis running fastest."""
    steps = [range(0, axis.size * axis.stride, axis.stride) for axis in axes]
    return [sum(step) for step in product(*steps)]


@dataclass(frozen=True)
class Cut:
    """How one dim is spread: a strip for each coordinate of the axes it uses.

    Equal cuts are equal by content, so the classes of a model share their tables and joins.
    """

    axes: tuple[Axis, ...]
    strips: tuple[Strip, ...]
    """One per coordinate, the last axis running fastest."""

    @cached_property
    def strip_of_part(self) -> dict[int, Strip]:
        return dict(zip(offsets(self.axes), self.strips, strict=True))

    @cached_property
    def keys(self) -> frozenset[str]:
        """The classes that it tells apart; none where the dim is the tensor's own."""
        named = (segment.key for strip in self.strips for segment in strip)
        return frozenset(key for key in named if key not in (None, OWN))

    @cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.strips))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Cut"], tuple[Any, ...]]:
        return Cut, (self.axes, self.strips)  # hashes of text differ between processes

    def part(self, rank: int) -> int:
        return sum(axis.coordinate(rank) * axis.stride for axis in self.axes)

    def strip(self, rank: int) -> Strip:
        return self.strip_of_part[self.part(rank)]


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of a cut that belong to one class, by part and place; arrays are read-only."""

    part: Ints
    lo: Ints
    hi: Ints
    loc: Ints


def make_table(cut: Cut, key: str) -> Table:
    """Tabulate a cut for one class. Equal cuts that do not name the class give the same object."""
    return _make_table(cut, key if key in cut.keys else OWN)


@lru_cache(maxsize=4096)
def _make_table(cut: Cut, key: str) -> Table:
    rows = []
    for part, strip in sorted(cut.strip_of_part.items()):
        loc = 0
        for segment in strip:
            if segment.key in (key, OWN):
                rows.append((part, segment.lo, segment.hi, loc))
            loc += segment.hi - segment.lo
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()
    columns.flags.writeable = False
    return Table(*columns)
