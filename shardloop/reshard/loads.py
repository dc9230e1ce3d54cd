"""What a flow moves between all ranks, without writing its runs out. Called by `cost`. Floor 1.

Consumers that differ in free axes alone want the same. Where a cell has one living holder it is
the same for all of them, so one row tells; in turns, each of them has its own.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from shardloop.layout.strips import Ints
from shardloop.reshard.flow import Flow, Route
from shardloop.reshard.runs import corners, counted, spread
from shardloop.reshard.turns import Turns, atoms_of, opened

Mask = np.ndarray[Any, np.dtype[np.bool_]]
NO_FREE = np.zeros(1, dtype=np.int64)
AT_ONCE = 1 << 18
"""How many deliveries are listed at once."""


class Load(NamedTuple):
    """What moves from ranks to ranks of the layouts, copies in place included."""

    src: Ints
    dst: Ints
    free: Ints
    """Offsets: as much moves from `src` to each `dst + free`."""
    num_elements: Ints
    num_transfers: int


def loads(route: Route, flow: Flow) -> Iterator[Load]:
    """All that a flow moves, some of it at a time; ranks are those of the layouts."""
    turns = Turns.of(route, flow, [np.arange(len(step.cell_atom)) for step in flow.joins])
    free = flow.consumers.free
    num_wants = flow.consumers.count(opened(turns.cells)).reshape(-1) // len(free)
    holder_start, holder_rank = _holders(flow, turns)

    def src_of(cell: Ints, consumer: Ints, j: Ints) -> Ints:
        return holder_rank[holder_start[cell] + turns.holder(cell, consumer, j)]

    is_alone = turns.num_holders == 1
    cell, want = counted(np.where(is_alone, num_wants, 0))
    yield _from_one(flow, turns, cell, want, src_of(cell, want, np.zeros_like(want)))
    cells, numbers = counted(np.where(is_alone, 0, num_wants * turns.period))
    step = 1 + AT_ONCE // len(free)
    for begin in range(0, len(cells), step):
        cell = cells[begin : begin + step]
        want, j = np.divmod(numbers[begin : begin + step], turns.period[cell])
        at = turns.cells_at(cell)
        consumer = want * len(free) + np.arange(len(free))[:, None]
        dst = flow.consumers.at(at, want * len(free))[0] + (free - free[0])[:, None]
        src = src_of(cell, consumer, j)
        near = _is_any(consumer, turns.near[:, cell])
        yield _load(flow, at, j, turns.period[cell], src, dst, ~near)
        copied = near & (j == 0)
        yield _load(flow, at, j, np.ones_like(j), route.twin_of_dst[dst], dst, copied)


def _from_one(flow: Flow, turns: Turns, cell: Ints, want: Ints, src: Ints) -> Load:
    """All layers of cells that one rank holds, to it and to others; of each want all free ranks."""
    free, at = flow.consumers.free, turns.cells_at(cell)
    dst, pairs = flow.consumers.at(at, want * len(free))
    lo, hi = corners(flow, pairs)
    num_transfers = int(np.prod(hi[:, :2] - lo[:, :2], axis=1).sum()) * len(free)
    return Load(src, dst, free - free[0], np.prod(hi - lo, axis=1), num_transfers)


def _holders(flow: Flow, turns: Turns) -> tuple[Ints, Ints]:
    """Ranks of the holders of all cells, and where those of each cell begin."""
    cell, number = counted(flow.holders.count(opened(atoms_of(flow, turns.cells))).reshape(-1))
    ranks, _ = flow.holders.at(atoms_of(flow, turns.cells_at(cell)), number)
    return np.flatnonzero(number == 0), ranks


def _is_any(number: Ints, wanted: Ints) -> Mask:
    found = np.zeros(number.shape, dtype=bool)
    for one in wanted:
        found |= number == one
    return found


def _load(
    flow: Flow, cells: list[Ints], j: Ints, period: Ints, src: Ints, dst: Ints, mask: Mask
) -> Load:
    """Deliveries j of rows of cells, to those consumers [free, rows] in the mask."""
    firsts = [step.consumers.start[cell] for step, cell in zip(flow.joins, cells, strict=True)]
    row, lo, hi, step = spread(*corners(flow, firsts), j, period)
    num_layers = -(-(hi[:, 0] - lo[:, 0]) // step)
    sizes = num_layers * np.prod(hi[:, 1:] - lo[:, 1:], axis=1)
    num_elements, num_transfers = np.zeros_like(j), np.zeros_like(j)
    np.add.at(num_elements, row, sizes)
    np.add.at(num_transfers, row, num_layers * (hi[:, 1] - lo[:, 1]))
    _, chosen = np.nonzero(mask)
    total = int(num_transfers[chosen].sum())
    return Load(src[mask], dst[mask], NO_FREE, num_elements[chosen], total)
