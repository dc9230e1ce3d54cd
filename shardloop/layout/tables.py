"""Meshes, cuts and tables: which rank holds what along some dims. Called by `layout` and `reshard`.

Floor 1.

Ranks add: a rank is the sum of coordinate x stride over the mesh axes, and the *part* of a rank in
a cut is that sum over the axes of the cut alone. A table lists, for one class, the rows
(part, lo, hi, loc): ranks of `part` hold the box lo:hi, and it starts at `loc` of their local dim.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from shardloop.layout.strips import OWN, PADDING, Ints, Strips

MOST_KEPT = 256
"""Tables, products and joins that are kept for the next plan, each: those of a few plans, since one
of zero3 on thousands of ranks has 10 MB of them."""


class Axis(NamedTuple):
    name: str
    size: int
    stride: int
    """Ranks that differ by 1 on this axis alone are this far apart."""

    def coordinate(self, rank: int) -> int:
        return rank // self.stride % self.size


Mesh = tuple[Axis, ...]


def make_mesh(axes: tuple[tuple[str, int], ...]) -> Mesh:
    """Axes with their strides, outermost first: the last axis has stride 1."""
    mesh: list[Axis] = []
    stride = 1
    for name, size in reversed(axes):
        mesh.insert(0, Axis(name, size, stride))
        stride *= size
    return tuple(mesh)


def offsets(axes: Mesh) -> Ints:
    """Rank offset of each coordinate of these axes, the last axis running fastest."""
    total = np.zeros(1, dtype=np.int64)
    for axis in axes:
        steps = np.arange(axis.size, dtype=np.int64) * axis.stride
        total = (total[:, None] + steps).reshape(-1)
    return total


@dataclass(frozen=True)
class Cut:
    """How some dims of a tensor are spread over ranks: a strip for each coordinate of its axes.

    Equal cuts are equal by content, so the classes of a model share their tables and joins.
    """

    dims: tuple[int, ...]
    """Canonical dims it covers, one after the other: 0 the layer, 1 the expert, then the tensor's
    own from 2. Several are a flat partition, with one local dim."""
    axes: Mesh
    strips: Strips
    """A part for each coordinate, the last axis running fastest."""

    @cached_property
    def named_keys(self) -> frozenset[str]:
        """The classes that it tells apart; none where the dim is the tensor's own."""
        used = np.unique(self.strips.key)
        return frozenset(self.strips.keys[k] for k in used.tolist() if k != PADDING) - {OWN}

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.axes, self.strips))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Cut"], tuple[Any, ...]]:
        return Cut, (self.dims, self.axes, self.strips)  # hashes of text differ between processes

    def index(self, rank: int) -> int:
        """Which of its strips `rank` has."""
        index = 0
        for axis in self.axes:
            index = index * axis.size + axis.coordinate(rank)
        return index

    def part(self, rank: int) -> int:
        return sum(axis.coordinate(rank) * axis.stride for axis in self.axes)


@dataclass(frozen=True, eq=False)
class Table:
    """The rows of a cut that belong to one class, by part and place."""

    part: Ints
    lo: Ints
    """[rows, dims covered]"""
    hi: Ints
    loc: Ints
    """[rows, cuts]: where the box starts in the local dim of each cut; one, but for products."""
    source: Ints
    """[rows]: which of several copies of a tied tensor has the row; 0 where there is but one."""


def make_table(cut: Cut, key: str) -> Table:
    """Tabulate a cut for one class. Equal cuts that do not name the class give the same object."""
    return _make_table(cut.axes, cut.strips, key if key in cut.named_keys else OWN)


@lru_cache(maxsize=MOST_KEPT)
def _make_table(axes: Mesh, strips: Strips, key: str) -> Table:
    wanted = [number for number, name in enumerate(strips.keys) if name in (key, OWN)]
    rows = np.flatnonzero(np.isin(strips.key, wanted))
    part = offsets(axes)[strips.part[rows]]
    order = np.argsort(part, kind="stable")
    rows = rows[order]
    source = np.zeros_like(part)
    return Table(part[order], strips.lo[rows], strips.hi[rows], strips.loc[rows, None], source)
