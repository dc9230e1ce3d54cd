"""The checks of a proof that concern one block of dims: tables, cover, holders, turns. Floor 1.

Called by `verify` once for each join, however many classes and layers share it. The declared rows
are read from the strips anew. Everything is counted on whole arrays; only faults are written out.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardloop.layout.layout import Box
from shardloop.layout.strips import Ints
from shardloop.layout.tables import Mesh, Table
from shardloop.reshard.join import Join
from shardloop.reshard.proof.cover import sweep, wrong_rows
from shardloop.reshard.proof.declared import Rows, box_text, ranks_text

MOST_FAULTS = 6
"""How many of one kind are written out for a block; of the others only the number."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """What the layouts declare for some dims of a class."""

    src: tuple[Rows, ...]
    """One for each source tensor."""
    dst: Rows
    src_axes: Mesh
    """Of the cuts of these dims: they tell the parts."""
    dst_axes: Mesh
    domain: Box


def block_faults(step: Join, block: Block) -> Iterator[str]:
    """What is wrong with one join: a text per fault. Wrong numbers and tables hide the rest."""
    faults = list(_shape_faults(step, block)) or list(_index_faults(step))
    faults = faults or [
        *_source_faults(step, block),
        *_table_faults("destination", step.dst, [block.dst], block.dst_axes),
        *_domain_faults("source", step.src, block.domain),
        *_domain_faults("destination", step.dst, block.domain),
    ]
    if faults:
        yield from faults
        return
    yield from _cover_faults(step, block)
    yield from _held_faults(step, block)
    yield from _turn_faults(step)


def some(bad: Ints, text: Callable[[int], str]) -> Iterator[str]:
    """The first faults written out, and how many more there are."""
    yield from (text(index) for index in bad[:MOST_FAULTS].tolist())
    if len(bad) > MOST_FAULTS:
        yield f"... and {len(bad) - MOST_FAULTS} more of this kind"


def _box(lo: Ints, hi: Ints, index: int) -> str:
    return box_text(tuple(zip(lo[index].tolist(), hi[index].tolist(), strict=True)))


def _shape_faults(step: Join, block: Block) -> Iterator[str]:
    num_dims, num_pairs, num_atoms = len(block.domain), len(step.atom), len(step.atom_lo)
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(("atom", "row", "cell"), (num_pairs,))
    expected |= dict.fromkeys(("lo", "hi"), (num_pairs, num_dims))
    expected |= dict.fromkeys(("atom_lo", "atom_hi"), (num_atoms, num_dims))
    expected |= {"holder_start": (num_atoms + 1,), "holder_row": (step.holder_row.size,)}
    for name, shape in expected.items():
        column = getattr(step, name)
        if _kind(column) != f"int64 {shape}":
            yield f"its column {name} is {_kind(column)}, it must be int64 {shape}"
    for side, table, rows in (
        ("source", step.src, block.src[0]),
        ("destination", step.dst, block.dst),
    ):
        num_rows = len(table.part)
        columns = (table.part, table.lo, table.hi, table.loc, table.source)
        line, box = (num_rows,), (num_rows, num_dims)
        shapes = [line, box, box, (num_rows, rows.loc.shape[1]), line]
        if list(map(_kind, columns)) != [f"int64 {shape}" for shape in shapes]:
            yield f"the columns of its {side} table are {', '.join(map(_kind, columns))}"


def _kind(column: Ints) -> str:
    return f"{column.dtype} {column.shape}"


def _index_faults(step: Join) -> Iterator[str]:
    start = step.holder_start
    if start[0] != 0 or start[-1] != len(step.holder_row) or (np.diff(start) < 1).any():
        yield f"its {len(step.atom_lo)} atoms do not all have holders"
    for what, index, size in (
        ("atom", step.atom, len(step.atom_lo)),
        ("destination row", step.row, len(step.dst.part)),
        ("holder", step.holder_row, len(step.src.part)),
    ):
        bad = index[(index < 0) | (index >= size)]
        yield from some(bad, f"{what} {{}} does not exist; there are {size}".format)


def _source_faults(step: Join, block: Block) -> Iterator[str]:
    """Copies with equal rows may be planned as one; else each row says whose it is."""
    sources = block.src
    if len(sources) > 1 and not step.src.source.any():
        first, *others = (_sorted(rows.matrix()) for rows in sources)
        sources = sources[:1] if all(np.array_equal(first, rows) for rows in others) else sources
    yield from _table_faults("source", step.src, sources, block.src_axes)


def _table_faults(side: str, table: Table, declared: Sequence[Rows], axes: Mesh) -> Iterator[str]:
    """The planned rows must be the declared ones, in any order."""
    columns = (table.part[:, None], table.lo, table.hi, table.loc, table.source[:, None])
    planned = np.concatenate(columns, axis=1)
    layout = np.concatenate(
        [np.c_[rows.matrix(), np.full(len(rows.part), i)] for i, rows in enumerate(declared)]
    )
    if np.array_equal(_by_part(planned), _by_part(layout)):  # as they come, and quick
        return
    if np.array_equal(_sorted(planned), _sorted(layout)):
        return
    num_dims = table.lo.shape[1]
    missing, extra = (Counter(map(tuple, rows.tolist())) for rows in (layout, planned))
    for title, rows in (("lacks", missing - extra), ("invents", extra - missing)):
        lines = sorted(rows.elements())

        def text(i: int, title: str = title, lines: list[tuple[int, ...]] = lines) -> str:
            part, *line = lines[i]
            box = tuple(zip(line[:num_dims], line[num_dims : 2 * num_dims], strict=True))
            loc = line[2 * num_dims : -1]
            copy = f" in copy {line[-1]}" if len(declared) > 1 else ""
            return (
                f"the {side} table {title} {box_text(box)} at place "
                f"{', '.join(map(str, loc))} of ranks {ranks_text(axes, part)}{copy}"
            )

        yield from some(np.arange(len(lines)), text)


def _by_part(matrix: Ints) -> Ints:
    return matrix[np.argsort(matrix[:, 0], kind="stable")]


def _sorted(matrix: Ints) -> Ints:
    return matrix[np.lexsort(matrix.T[::-1])]


def _domain_faults(side: str, table: Table, domain: Box) -> Iterator[str]:
    first, last = np.array(domain, dtype=np.int64).T
    outside = (table.lo < first) | (table.hi > last) | (table.lo >= table.hi)
    yield from some(
        np.flatnonzero(outside.any(axis=1)),
        lambda i: f"{side} row {_box(table.lo, table.hi, i)} is no part of {box_text(domain)}",
    )


def _cover_faults(step: Join, block: Block) -> Iterator[str]:
    """The pairs of each destination row make up its box, each element once."""
    bad = wrong_rows(step.row, step.lo, step.hi, step.dst.lo, step.dst.hi)
    for row in bad[:MOST_FAULTS].tolist():
        who = ranks_text(block.dst_axes, int(step.dst.part[row]))
        yield from (f"{who} {text}" for text in _miscounts(step, row))
    if len(bad) > MOST_FAULTS:
        yield f"... and {len(bad) - MOST_FAULTS} more rows of the destination are not made up once"


def _miscounts(step: Join, row: int) -> Iterator[str]:
    pairs = np.flatnonzero(step.row == row)
    empty = (step.lo[pairs] >= step.hi[pairs]).any(axis=1)
    yield from some(pairs[empty], lambda i: f"gets {_box(step.lo, step.hi, i)}, which is empty")
    pairs = pairs[~empty]
    lo = np.concatenate([step.dst.lo[row : row + 1], step.lo[pairs]])
    hi = np.concatenate([step.dst.hi[row : row + 1], step.hi[pairs]])
    found = []
    for box, members in sweep(lo, hi):
        wanted = int(0 in members)
        if (count := len(members) - wanted) != wanted:
            beyond = "" if wanted else ", which is not in its row"
            times = ("never", "once", "twice")[count] if count < 3 else f"{count} times"
            found.append(f"gets {box_text(box)} {times}{beyond}")
    yield from some(np.arange(len(found)), found.__getitem__)


def _held_faults(step: Join, block: Block) -> Iterator[str]:
    atom_lo, atom_hi = step.atom_lo[step.atom], step.atom_hi[step.atom]
    outside = ((step.lo < atom_lo) | (step.hi > atom_hi)).any(axis=1)
    yield from some(
        np.flatnonzero(outside),
        lambda i: (
            f"{_box(step.lo, step.hi, i)} is taken from holders of {_box(atom_lo, atom_hi, i)}, "
            "who need not hold it"
        ),
    )
    atom = np.repeat(np.arange(len(step.atom_lo)), np.diff(step.holder_start))
    lo, hi = step.src.lo[step.holder_row], step.src.hi[step.holder_row]
    part = step.src.part[step.holder_row]
    lacking = ((lo > step.atom_lo[atom]) | (hi < step.atom_hi[atom])).any(axis=1)
    yield from some(
        np.flatnonzero(lacking),
        lambda i: (
            f"source ranks {ranks_text(block.src_axes, int(part[i]))} hold {_box(lo, hi, i)}, "
            f"not {_box(step.atom_lo, step.atom_hi, int(atom[i]))}"
        ),
    )
    unordered = (atom[1:] == atom[:-1]) & (part[1:] <= part[:-1])
    yield from some(
        np.flatnonzero(unordered) + 1,
        lambda i: (
            f"source ranks {ranks_text(block.src_axes, int(part[i]))} are listed twice or out of "
            f"order as holders of {_box(step.atom_lo, step.atom_hi, int(atom[i]))}"
        ),
    )


def _turn_faults(step: Join) -> Iterator[str]:
    """Pairs lie cell by cell, in each by part: both ends count consumers alike."""
    new = np.ones(len(step.cell), dtype=bool)
    new[1:] = step.cell[1:] != step.cell[:-1]
    group = np.cumsum(new) - 1
    first = np.flatnonzero(new)[group]
    yield from some(
        np.flatnonzero(step.cell != group),
        lambda i: f"consumer {i} is of cell {step.cell[i]}, it must be of cell {group[i]}",
    )
    alike = step.atom == step.atom[first]
    for column in (step.lo, step.hi):
        alike &= (column == column[first]).all(axis=1)
    yield from some(np.flatnonzero(~alike), lambda i: f"cell {step.cell[i]} mixes different boxes")
    part = step.dst.part[step.row]
    unordered = ~new[1:] & (part[1:] <= part[:-1])
    back = step.atom[1:] < step.atom[:-1]
    yield from some(
        np.flatnonzero(unordered | back) + 1,
        lambda i: f"consumer {i} is listed twice or out of order; they go by atom, cell and part",
    )
