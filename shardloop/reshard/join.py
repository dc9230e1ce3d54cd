"""Where two tables meet: which boxes of elements go from whom to whom. Floor 1.

Called by `reshard.plan`, once for each pair of equal tables whatever the number of layers.

    atom   a box that the same source parts, its holders, hold as a whole
    pair   the common box of an atom and a destination row
    cell   a box that several destination rows want alike: they take turns
"""

import hashlib
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np

from shardloop.layout.strips import Ints, read_only
from shardloop.layout.tables import MOST_KEPT, Table
from shardloop.reshard.boxes import find_atoms, new_groups, overlaps
from shardloop.reshard.members import Members


@dataclass(frozen=True, eq=False)
class Join:
    """All pairs of two tables, by cell."""

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
    """Pairs of a cell lie side by side, by part."""

    def sealed(self) -> "Join":
        """The same numbers in arrays that nobody can write to, under whatever name."""
        return _sealed(replace(self, src=_sealed(self.src), dst=_sealed(self.dst)))

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of all its numbers."""
        digest = hashlib.sha256()
        for part in (self.src, self.dst, self):
            for column in _columns(part).values():
                digest.update(repr(column.shape).encode() + column.tobytes())
        return digest.digest()

    @cached_property
    def holders(self) -> Members:
        """Source parts, by atom."""
        return Members(self.holder_start, self.src.part[self.holder_row])

    @cached_property
    def consumers(self) -> Members:
        """Destination parts, by cell; places are pairs."""
        starts = np.flatnonzero(new_groups(self.cell))
        return Members(np.append(starts, len(self.row)), self.dst.part[self.row])

    @cached_property
    def cell_atom(self) -> Ints:
        """[cells]: the atom that each is part of, increasing."""
        return read_only(self.atom[self.consumers.start[:-1]])


@lru_cache(maxsize=MOST_KEPT)
def join(src: Table, dst: Table) -> Join:
    """Meet two tables. Tables are told apart by identity, and the cache keeps them alive."""
    atoms = find_atoms(src)
    atom, row = overlaps(atoms.lo, atoms.hi, dst.lo, dst.hi)
    lo = np.maximum(atoms.lo[atom], dst.lo[row])
    hi = np.minimum(atoms.hi[atom], dst.hi[row])
    order = np.lexsort((dst.part[row], *hi.T, *lo.T, atom))
    atom, row, lo, hi = atom[order], row[order], lo[order], hi[order]
    cell = np.cumsum(new_groups(atom, *lo.T, *hi.T)) - 1
    found = Join(src, dst, atoms.lo, atoms.hi, atoms.start, atoms.row, atom, row, lo, hi, cell)
    for part in (found, src, dst):
        for array in _columns(part).values():
            read_only(array)
    return found


Part = TypeVar("Part", Join, Table)


def _columns(part: Join | Table) -> dict[str, Ints]:
    columns = {field.name: getattr(part, field.name) for field in fields(part)}
    return {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}


def _sealed(part: Part) -> Part:
    """Shares the arrays that are read-only and no view of another; the rest it copies."""
    columns = _columns(part)
    copied = {
        name: read_only(column.copy())
        for name, column in columns.items()
        if column.flags.writeable or column.base is not None
    }
    return replace(part, **copied)  # type: ignore[arg-type]  # both have columns of these names
