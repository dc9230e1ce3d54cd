"""Where two tables meet along one dim: which run of elements goes from whom to whom. Floor 1.

Called by `reshard.plan`, once for each pair of equal tables whatever the number of layers.

An *atom* is a run that the same source parts hold as a whole; a *pair* is the common run of an atom
and a destination row. A *cell* is a run that several destination rows want alike: `mult` of them,
and `turn` is a pair's number among these.
"""

import hashlib
from collections import defaultdict
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from shardloop.layout.tables import Ints, Table


class Pair(NamedTuple):
    """One pair of a join as plain numbers."""

    lo: int
    hi: int
    cell: int
    turn: int
    mult: int
    dst_part: int
    dst_start: int
    """Where lo lies in the destination's local dim."""
    holder_parts: tuple[int, ...]
    src_starts: tuple[int, ...]
    """Where lo lies in each holder's local dim."""


@dataclass(frozen=True, eq=False)
class Join:
    """All pairs of two tables; arrays are read-only once frozen, as `join` makes them."""

    src: Table
    dst: Table
    atom_lo: Ints
    atom_hi: Ints
    holder_start: Ints
    """Holders of atom a are holder_row[holder_start[a]:holder_start[a + 1]]."""
    holder_row: Ints
    """Rows of `src`."""
    atom: Ints
    row: Ints
    """Row of `dst`; this and the following have one entry per pair."""
    lo: Ints
    hi: Ints
    cell: Ints
    turn: Ints
    mult: Ints

    def freeze(self) -> None:
        """Make its arrays and those of its tables read-only."""
        for part in (self, self.src, self.dst):
            for array in (getattr(part, field.name) for field in fields(part)):
                if isinstance(array, np.ndarray):
                    array.flags.writeable = False

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all its numbers."""
        digest = hashlib.sha256()
        for table in (self.src, self.dst):
            for column in (table.part, table.lo, table.hi, table.loc):
                digest.update(column.tobytes())
        for column in (self.atom_lo, self.atom_hi, self.holder_start, self.holder_row):
            digest.update(column.tobytes())
        for column in (self.atom, self.row, self.lo, self.hi, self.cell, self.turn, self.mult):
            digest.update(column.tobytes())
        return digest.digest()

    @cached_property
    def pairs(self) -> tuple[Pair, ...]:
        src_part, src_base = self.src.part.tolist(), (self.src.loc - self.src.lo).tolist()
        dst_part, dst_base = self.dst.part.tolist(), (self.dst.loc - self.dst.lo).tolist()
        start, holder_row = self.holder_start.tolist(), self.holder_row.tolist()
        columns = (self.atom, self.row, self.lo, self.hi, self.cell, self.turn, self.mult)
        found = []
        for atom, row, lo, hi, cell, turn, mult in zip(*(c.tolist() for c in columns), strict=True):
            holders = holder_row[start[atom] : start[atom + 1]]
            parts = tuple(src_part[h] for h in holders)
            starts = tuple(lo + src_base[h] for h in holders)
            found.append(
                Pair(lo, hi, cell, turn, mult, dst_part[row], lo + dst_base[row], parts, starts)
            )
        return tuple(found)

    @cached_property
    def pairs_to(self) -> dict[int, tuple[Pair, ...]]:
        """Pairs by destination part."""
        grouped = defaultdict(list)
        for pair in self.pairs:
            grouped[pair.dst_part].append(pair)
        return {part: tuple(pairs) for part, pairs in grouped.items()}

    @cached_property
    def pairs_from(self) -> dict[int, tuple[Pair, ...]]:
        """Pairs by source part: those for which it is a holder."""
        grouped = defaultdict(list)
        for pair in self.pairs:
            for part in pair.holder_parts:
                grouped[part].append(pair)
        return {part: tuple(pairs) for part, pairs in grouped.items()}


@lru_cache(maxsize=4096)
def join(src: Table, dst: Table) -> Join:
    """Meet two tables. Tables are told apart by identity, and the cache keeps them alive."""
    atom_lo, atom_hi, holder_start, holder_row = _atoms(src)
    row, atom = _expand(
        np.searchsorted(atom_hi, dst.lo, side="right"),
        np.searchsorted(atom_lo, dst.hi, side="left"),
    )
    lo = np.maximum(atom_lo[atom], dst.lo[row])
    hi = np.minimum(atom_hi[atom], dst.hi[row])
    cell, turn, mult = _number_equal(atom, lo, hi)
    arrays = (atom_lo, atom_hi, holder_start, holder_row, atom, row, lo, hi, cell, turn, mult)
    found = Join(src, dst, *arrays)
    found.freeze()
    return found


def _atoms(table: Table) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut the rows at each other's ends: disjoint runs in order, with the rows that hold each."""
    points = np.unique(np.concatenate([table.lo, table.hi]))
    row, run = _expand(np.searchsorted(points, table.lo), np.searchsorted(points, table.hi))
    order = np.lexsort((row, run))
    row, run = row[order], run[order]
    held, start = np.unique(run, return_index=True)
    return points[held], points[held + 1], np.append(start, len(run)), row


def _expand(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """(i, j) for every i and every j in first[i]:last[i]; an empty range gives none."""
    count = np.maximum(last - first, 0)
    index = np.repeat(np.arange(len(count)), count)
    begin = np.cumsum(count) - count
    return index, first[index] + np.arange(len(index)) - begin[index]


def _number_equal(atom: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints]:
    """Number the pairs with equal runs: their cell, each one's turn in it, and their number."""
    order = np.lexsort((hi, lo, atom))
    keys = np.stack([atom, lo, hi])[:, order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    start = np.flatnonzero(new)
    cell = np.empty(len(order), dtype=np.int64)
    cell[order] = np.cumsum(new) - 1
    turn = np.empty_like(cell)
    turn[order] = np.arange(len(order)) - start[cell[order]]
    mult = np.diff(np.append(start, len(order)))[cell]
    return cell, turn, mult
