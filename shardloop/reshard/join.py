"""Where two tables meet: which boxes of elements go from whom to whom. Floor 1.

Called by `reshard.plan`, once for each pair of equal tables whatever the number of layers.

    atom   a box that the same source parts, its holders, hold as a whole
    pair   the common box of an atom and a destination row
    cell   a box that several destination rows want alike: `mult` of them, taking turns
"""

import hashlib
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

import numpy as np

from shardloop.layout.strips import Ints
from shardloop.layout.tables import Table
from shardloop.reshard.boxes import find_atoms, new_groups, overlaps
from shardloop.reshard.members import Members


@dataclass(frozen=True, eq=False)
class Join:
    """All pairs of two tables, by cell; arrays are read-only, as `join` makes them."""

    src: Table
    dst: Table
    atom_lo: Ints
    """[atoms, dims]: disjoint boxes."""
    atom_hi: Ints
    holder_start: Ints
    """Holders of atom a are holder_row[holder_start[a]:holder_start[a + 1]], by part."""
    holder_row: Ints
    """Rows of `src`."""
    atom: Ints
    """[pairs], as all that follow."""
    row: Ints
    """Row of `dst`."""
    lo: Ints
    """[pairs, dims]"""
    hi: Ints
    cell: Ints
    turn: Ints
    """The pair's number among those of its cell."""
    mult: Ints
    """How many pairs its cell has."""

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
        for part in (self.src, self.dst, self):
            for column in (getattr(part, field.name) for field in fields(part)):
                if isinstance(column, np.ndarray):
                    digest.update(repr(column.shape).encode() + column.tobytes())
        return digest.digest()

    @cached_property
    def holders(self) -> Members:
        """Source parts, by atom."""
        return Members(self.holder_start, self.src.part[self.holder_row])

    @cached_property
    def consumers(self) -> Members:
        """Destination parts, by cell; places are pairs."""
        starts = np.flatnonzero(self.turn == 0)
        return Members(np.append(starts, len(self.row)), self.dst.part[self.row])

    @cached_property
    def cell_atom(self) -> Ints:
        """[cells]: the atom that each is part of, increasing."""
        return self.atom[self.consumers.start[:-1]]


@lru_cache(maxsize=1024)
def join(src: Table, dst: Table) -> Join:
    """Meet two tables. Tables are told apart by identity, and the cache keeps them alive."""
    atoms = find_atoms(src)
    atom, row = overlaps(atoms.lo, atoms.hi, dst.lo, dst.hi)
    lo = np.maximum(atoms.lo[atom], dst.lo[row])
    hi = np.minimum(atoms.hi[atom], dst.hi[row])
    order = np.lexsort((dst.part[row], *hi.T, *lo.T, atom))
    atom, row, lo, hi = atom[order], row[order], lo[order], hi[order]
    start = np.flatnonzero(new_groups(atom, *lo.T, *hi.T))
    mult = np.diff(np.append(start, len(row)))
    cell = np.repeat(np.arange(len(start)), mult)
    turn = np.arange(len(row)) - start[cell]
    found = Join(
        src, dst, atoms.lo, atoms.hi, atoms.start, atoms.row, atom, row, lo, hi, cell, turn,
        mult[cell],
    )  # fmt: skip
    found.freeze()
    return found
