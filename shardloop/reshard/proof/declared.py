"""What the cuts of a layout declare, read from their strips anew for the proof. Floor 1.

Called by `verify`, `checks` and `sides`. It shares nothing with the tables that a plan is made
from, so that a mistake in those does not hide itself.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardloop.layout.layout import Box
from shardloop.layout.strips import OWN, Ints
from shardloop.layout.tables import Cut, Mesh


class Rows(NamedTuple):
    """The boxes of one class that each part holds, and where they lie in the local dims."""

    part: Ints
    lo: Ints
    """[rows, dims]"""
    hi: Ints
    loc: Ints
    """[rows, cuts]"""

    def matrix(self) -> Ints:
        """One line of numbers for each row."""
        return np.concatenate([self.part[:, None], self.lo, self.hi, self.loc], axis=1)


def declared_rows(cut: Cut, key: str) -> Rows:
    """The rows of one cut that belong to a class."""
    strips = cut.strips
    size = np.prod(strips.hi - strips.lo, axis=1)
    end = np.cumsum(size)
    start = end - size
    loc = start - start[np.searchsorted(strips.part, strips.part)]
    is_mine = np.array([*(name in (OWN, key) for name in strips.keys), False])
    rows = np.flatnonzero(is_mine[strips.key])
    part = part_of_index(cut.axes, strips.part[rows])
    return Rows(part, strips.lo[rows], strips.hi[rows], loc[rows, None])


def part_of_index(axes: Mesh, index: Ints) -> Ints:
    """Sum of coordinate x stride, of places counted with the last axis running fastest."""
    part = np.zeros_like(index)
    for axis in reversed(axes):
        part = part + index % axis.size * axis.stride
        index = index // axis.size
    return part


def product_of(tables: Sequence[Rows]) -> Rows:
    """All combinations of rows, one of each cut: parts add, boxes and places stand side by side."""
    first, *rest = tables
    for table in rest:
        a, b = (m.reshape(-1) for m in np.indices((len(first.part), len(table.part))))
        first = Rows(
            first.part[a] + table.part[b],
            np.concatenate([first.lo[a], table.lo[b]], axis=1),
            np.concatenate([first.hi[a], table.hi[b]], axis=1),
            np.concatenate([first.loc[a], table.loc[b]], axis=1),
        )
    return first


def ranks_text(axes: Mesh, part: int) -> str:
    """The ranks of a part in words: `tp=1, fsdp=3`."""
    places = [f"{axis.name}={axis.coordinate(part)}" for axis in axes]
    return ", ".join(places) or "every rank"


def box_text(box: Box) -> str:
    return " x ".join(f"{lo}:{hi}" for lo, hi in box)


def dims_text(dims: Sequence[int]) -> str:
    """Canonical dims as a reader of tensors counts them."""
    names = {0: "layers", 1: "experts"}
    return " and ".join(names.get(dim, f"dim {dim - 2}") for dim in dims)
