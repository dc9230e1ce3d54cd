"""Boxes of any number of dims: which overlap, and their common refinement. Floor 1.

Called by `reshard.join`.
"""

from typing import NamedTuple

import numpy as np

from shardloop.layout.strips import Ints, expand
from shardloop.layout.tables import Table


class Atoms(NamedTuple):
    """Disjoint boxes, by their first corners, and the rows of a table that contain each."""

    lo: Ints
    hi: Ints
    start: Ints
    """Rows of atom a are row[start[a]:start[a + 1]], by part: one for each."""
    row: Ints


def find_atoms(table: Table) -> Atoms:
    """The boxes of a table with their holders; where some overlap in part, all are cut."""
    row = np.arange(len(table.part))
    atoms = _grouped(table, row, table.lo, table.hi)
    if len(overlaps(atoms.lo, atoms.hi, atoms.lo, atoms.hi)[0]) == len(atoms.lo):
        return atoms
    lo, hi = table.lo, table.hi
    for dim in range(lo.shape[1]):
        row, lo, hi = _cut_at_all_ends(dim, row, lo, hi)
    return _grouped(table, row, lo, hi)


def overlaps(a_lo: Ints, a_hi: Ints, b_lo: Ints, b_hi: Ints) -> tuple[Ints, Ints]:
    """(a, b) of every two boxes that have an element in common.

    A sweep along the first dim, by which the boxes a must be sorted; the others are filtered.
    """
    reach = np.maximum.accumulate(a_hi[:, 0])
    first = np.searchsorted(reach, b_lo[:, 0], side="right")
    last = np.searchsorted(a_lo[:, 0], b_hi[:, 0], side="left")
    b, a = expand(first, last)
    for dim in range(a_lo.shape[1]):
        meet = (a_lo[a, dim] < b_hi[b, dim]) & (b_lo[b, dim] < a_hi[a, dim])
        if not meet.all():
            a, b = a[meet], b[meet]
    return a, b


def new_groups(*columns: Ints) -> np.ndarray:
    """Where, in sorted rows, each run of equal rows begins."""
    new = np.zeros(len(columns[0]), dtype=bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new


def _grouped(table: Table, row: Ints, lo: Ints, hi: Ints) -> Atoms:
    """Equal boxes as one. Of a part's copies of a box (tied tensors) the first counts."""
    part = table.part[row]
    order = np.lexsort((part, *hi.T[::-1], *lo.T[::-1]))
    row, lo, hi, part = row[order], lo[order], hi[order], part[order]
    new_box = new_groups(*lo.T, *hi.T)
    kept = new_box | new_groups(part)
    row, lo, hi, new_box = row[kept], lo[kept], hi[kept], new_box[kept]
    start = np.flatnonzero(new_box)
    return Atoms(lo[start], hi[start], np.append(start, len(row)), row)


def _cut_at_all_ends(dim: int, row: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut the boxes along one dim wherever one of them begins or ends."""
    points = np.unique(np.concatenate([lo[:, dim], hi[:, dim]]))
    box, run = expand(np.searchsorted(points, lo[:, dim]), np.searchsorted(points, hi[:, dim]))
    lo, hi = lo[box], hi[box]
    lo[:, dim], hi[:, dim] = points[run], points[run + 1]
    return row[box], lo, hi
