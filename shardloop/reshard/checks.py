"""The checks of `reshard.verify` that concern one dim: tables, cover, holders, turns. Floor 1.

Called by `verify` once per join. The declared rows are read from the strips anew, not with the
planner's functions.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from shardloop.layout.strips import OWN
from shardloop.layout.tables import Cut, Ints, Table
from shardloop.reshard.join import Join


@dataclass(frozen=True, slots=True)
class _Rows:
    """Declared rows of one class, read from strips; one entry per row, by part and place."""

    part: Ints
    lo: Ints
    hi: Ints
    loc: Ints


def dim_faults(
    step: Join, src_cut: Cut, dst_cut: Cut, key: str, domain: tuple[int, int]
) -> Iterator[str]:
    """What is wrong with one join: a text per fault."""
    index_faults = list(_index_faults(step))
    if index_faults:
        yield from index_faults
        return
    src, dst = _declared(src_cut, key), _declared(dst_cut, key)
    yield from _table_faults("source", step.src, src)
    yield from _table_faults("destination", step.dst, dst)
    yield from _domain_faults(src, dst, domain)
    yield from _cover_faults(step)
    yield from _held_faults(step)
    yield from _turn_faults(step)


def _declared(cut: Cut, key: str) -> _Rows:
    rows = []
    coordinates = product(*(range(axis.size) for axis in cut.axes))
    for coordinate, strip in zip(coordinates, cut.strips, strict=False):
        part = sum(c * axis.stride for c, axis in zip(coordinate, cut.axes, strict=True))
        end = 0
        for segment_key, lo, hi in strip:
            if segment_key in (OWN, key):
                rows.append((part, end, lo, hi))
            end += hi - lo
    columns = np.array(sorted(rows), dtype=np.int64).reshape(-1, 4).T
    return _Rows(part=columns[0], loc=columns[1], lo=columns[2], hi=columns[3])


def _index_faults(step: Join) -> Iterator[str]:
    num_atoms, num_pairs = len(step.atom_lo), len(step.lo)
    columns = (step.atom, step.row, step.hi, step.cell, step.turn, step.mult)
    if any(len(column) != num_pairs for column in columns):
        yield f"its columns are not all of length {num_pairs}"
        return
    start = step.holder_start
    if (
        len(step.atom_hi) != num_atoms
        or len(start) != num_atoms + 1
        or start[0] != 0
        or start[-1] != len(step.holder_row)
        or (np.diff(start) < 1).any()
    ):
        yield f"its {num_atoms} atoms do not all have holders"
    for what, index, size in (
        ("atom", step.atom, num_atoms),
        ("destination row", step.row, len(step.dst.lo)),
        ("holder", step.holder_row, len(step.src.lo)),
    ):
        for bad in index[(index < 0) | (index >= size)].tolist():
            yield f"{what} {bad} does not exist; there are {size}"


def _table_faults(side: str, table: Table, declared: _Rows) -> Iterator[str]:
    """The planned rows must be the declared ones, in any order."""
    planned = sorted(zip(*(c.tolist() for c in _columns(table)), strict=True))
    layout = sorted(zip(*(c.tolist() for c in _columns(declared)), strict=True))
    if planned == layout:
        return
    missing, extra = Counter(layout), Counter(planned)
    for title, rows in (("lacks", missing - extra), ("invents", extra - missing)):
        for part, lo, hi, loc in sorted(rows.elements()):
            yield f"{side} table {title} part {part} holding {lo}:{hi} at {loc}"


def _columns(rows: Table | _Rows) -> tuple[Ints, Ints, Ints, Ints]:
    return rows.part, rows.lo, rows.hi, rows.loc


def _domain_faults(src: _Rows, dst: _Rows, domain: tuple[int, int]) -> Iterator[str]:
    for side, rows in (("source", src), ("destination", dst)):
        outside = (rows.lo < domain[0]) | (rows.hi > domain[1]) | (rows.lo >= rows.hi)
        for lo, hi in zip(rows.lo[outside].tolist(), rows.hi[outside].tolist(), strict=True):
            yield f"{side} row {lo}:{hi} is no part of {domain[0]}:{domain[1]}"
        reached = domain[0]
        for lo, hi in sorted(set(zip(rows.lo.tolist(), rows.hi.tolist(), strict=True))):
            if lo > reached:
                yield f"no rank of the {side} holds {reached}:{lo}"
            reached = max(reached, hi)
        if reached < domain[1]:
            yield f"no rank of the {side} holds {reached}:{domain[1]}"


def _cover_faults(step: Join) -> Iterator[str]:
    """Per destination row: sorted by their ends, the pairs follow each other without gap."""
    order = np.lexsort((step.hi, step.lo, step.row))
    row, lo, hi = step.row[order], step.lo[order], step.hi[order]
    for bad in np.flatnonzero(lo >= hi).tolist():
        yield f"pair {lo[bad]}:{hi[bad]} is empty"
    first = np.ones(len(row), dtype=bool)
    first[1:] = row[1:] != row[:-1]
    expected = np.where(first, step.dst.lo[row], np.roll(hi, 1))
    last = np.roll(first, -1)
    for bad in np.flatnonzero(lo != expected).tolist():
        kind = "twice" if lo[bad] < expected[bad] else "never"
        yield (
            f"part {step.dst.part[row[bad]]} gets {min(lo[bad], expected[bad])}:"
            f"{max(lo[bad], expected[bad])} {kind}"
        )
    for bad in np.flatnonzero(last & (hi != step.dst.hi[row])).tolist():
        yield (
            f"part {step.dst.part[row[bad]]} gets {lo[bad]}:{hi[bad]} as the end of its run "
            f"{step.dst.lo[row[bad]]}:{step.dst.hi[row[bad]]}"
        )
    for bad in sorted(set(range(len(step.dst.lo))) - set(row.tolist())):
        yield f"part {step.dst.part[bad]} never gets {step.dst.lo[bad]}:{step.dst.hi[bad]}"


def _held_faults(step: Join) -> Iterator[str]:
    atom_lo, atom_hi = step.atom_lo[step.atom], step.atom_hi[step.atom]
    for bad in np.flatnonzero((step.lo < atom_lo) | (step.hi > atom_hi)).tolist():
        yield (
            f"{step.lo[bad]}:{step.hi[bad]} is taken from holders of "
            f"{atom_lo[bad]}:{atom_hi[bad]}, who need not hold it"
        )
    atom = np.repeat(np.arange(len(step.atom_lo)), np.diff(step.holder_start))
    lo, hi = step.src.lo[step.holder_row], step.src.hi[step.holder_row]
    for bad in np.flatnonzero((lo > step.atom_lo[atom]) | (hi < step.atom_hi[atom])).tolist():
        yield (
            f"part {step.src.part[step.holder_row[bad]]} holds {lo[bad]}:{hi[bad]}, "
            f"not {step.atom_lo[atom[bad]]}:{step.atom_hi[atom[bad]]}"
        )
    parts = Counter(zip(atom.tolist(), step.src.part[step.holder_row].tolist(), strict=True))
    for (number, part), count in parts.items():
        if count > 1:
            yield f"part {part} is listed {count} times as a holder of atom {number}"


def _turn_faults(step: Join) -> Iterator[str]:
    order = np.lexsort((step.turn, step.cell))
    cell, turn, mult = step.cell[order], step.turn[order], step.mult[order]
    first = np.ones(len(cell), dtype=bool)
    first[1:] = cell[1:] != cell[:-1]
    start = np.flatnonzero(first)
    group = np.cumsum(first) - 1
    size = np.diff(np.append(start, len(cell)))[group]
    runs = np.stack([step.atom, step.lo, step.hi])[:, order]
    alike = (runs == runs[:, start[group]]).all(axis=0)
    misnumbered = (turn != np.arange(len(cell)) - start[group]) | (mult != size)
    for bad in np.flatnonzero(misnumbered).tolist():
        yield f"cell {cell[bad]}: turn {turn[bad]} of {mult[bad]} among {size[bad]} consumers"
    for bad in np.flatnonzero(~alike).tolist():
        yield f"cell {cell[bad]} mixes different runs"
