"""What one rank receives and sends, as runs. Called by `Plan`. Floor 1.

A receiver knows its pairs and asks the turns for their holders; a sender knows the cells it holds
and asks the turns for their consumers. Both write out the same rule, so they need no talk.
"""

from collections.abc import Iterator
from math import prod

import numpy as np

from shardloop.layout.strips import Ints, expand
from shardloop.reshard.flow import Flow, Route, Runs
from shardloop.reshard.sides import NOBODY, Side
from shardloop.reshard.turns import Turns, atoms_of, opened


def runs_to(route: Route, dst: int) -> Iterator[Runs]:
    """What rank `dst` of the destination layout receives, flow by flow."""
    own = int(route.twin_of_dst[dst])
    for flow in route.flows:
        pairs = flow.consumers.places_of(dst)
        if all(map(len, pairs)):
            cells = [step.cell[pair] for step, pair in zip(flow.joins, pairs, strict=True)]
            turns = Turns.of(route, flow, cells)
            consumer = _number(flow.consumers, cells, dst)
            holder = _number(flow.holders, atoms_of(flow, cells), own)
            near = holder != NOBODY
            cell, j = counted(np.where(near, 0, turns.period))
            sent = cell, turns.holder(cell, consumer[cell], j), consumer[cell], j
            yield _deliveries(turns, sent, (np.flatnonzero(near), holder[near], consumer[near]))


def runs_from(route: Route, src: int) -> Iterator[Runs]:
    """What rank `src` of the source layout sends: the same rule, solved from the other side."""
    own = int(route.twin[src])
    for flow in route.flows:
        cells = held_cells(flow, src)
        if all(map(len, cells)):
            turns = Turns.of(route, flow, cells)
            holder = _number(flow.holders, atoms_of(flow, cells), src)
            consumer = _number(flow.consumers, cells, own)
            near = consumer != NOBODY
            cell, i = counted(turns.num_deliveries)
            sent = cell, holder[cell], *turns.delivery(cell, holder[cell], i)
            yield _deliveries(turns, sent, (np.flatnonzero(near), holder[near], consumer[near]))


def held_cells(flow: Flow, src: int) -> list[Ints]:
    """The cells that a source rank holds, by block."""
    cells = []
    for step, places in zip(flow.joins, flow.holders.places_of(src), strict=True):
        atom = step.holders.group[places]
        first, last = (np.searchsorted(step.cell_atom, atom, side=s) for s in ("left", "right"))
        cells.append(expand(first, last)[1])
    return cells


def _deliveries(
    turns: Turns, sent: tuple[Ints, Ints, Ints, Ints], copies: tuple[Ints, Ints, Ints]
) -> Runs:
    """The runs of what is sent and of what is copied in place.

    Args:
        sent: cells, numbers of holders and of consumers, and which of their deliveries.
        copies: cells, and the numbers of a rank as holder and as consumer.
    """
    flow = turns.flow
    cell, holder, consumer = (np.concatenate(two) for two in zip(sent[:3], copies, strict=True))
    j = np.concatenate([sent[3], np.zeros_like(copies[0])])
    period = np.concatenate([turns.period[sent[0]], np.ones_like(copies[0])])
    cells = turns.cells_at(cell)
    src, places = flow.holders.at(atoms_of(flow, cells), holder)
    dst, pairs = flow.consumers.at(cells, consumer)
    chosen = list(zip(flow.joins, places, pairs, strict=True))
    run, lo, hi, step = spread(*corners(flow, pairs), j, period)
    return Runs(
        flow=flow,
        src=src[run],
        dst=dst[run],
        lo=lo,
        hi=hi,
        step=step,
        src_row=np.stack([join.holder_row[place[run]] for join, place, _ in chosen], axis=1),
        dst_row=np.stack([join.row[pair[run]] for join, _, pair in chosen], axis=1),
    )


def corners(flow: Flow, pairs: list[Ints]) -> tuple[Ints, Ints]:
    """[*, canonical dims]: the boxes of products of pairs."""
    chosen = list(zip(flow.joins, pairs, strict=True))
    lo = np.concatenate([step.lo[pair] for step, pair in chosen], axis=1)
    hi = np.concatenate([step.hi[pair] for step, pair in chosen], axis=1)
    return lo, hi


def spread(lo: Ints, hi: Ints, j: Ints, period: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Every period-th layer from j on, and chunk j of the layers left over.

    Returns:
        Index of the delivery, corners and step of each run.
    """
    rest = hi[:, 0] - (hi[:, 0] - lo[:, 0]) % period  # first of the layers left over
    whole = np.flatnonzero(lo[:, 0] < rest)
    whole_lo, whole_hi = lo[whole], hi[whole]
    whole_lo[:, 0] += j[whole]
    whole_hi[:, 0] = rest[whole]
    cut = np.flatnonzero(rest < hi[:, 0])
    cut_lo, cut_hi = lo[cut], hi[cut]
    cut_lo[:, 0] = rest[cut]
    dim = 1 + np.argmax(cut_hi[:, 1:] - cut_lo[:, 1:], axis=1)
    at = np.arange(len(cut)), dim
    first, size = cut_lo[at], cut_hi[at] - cut_lo[at]
    cut_lo[at] = first + size * j[cut] // period[cut]
    cut_hi[at] = first + size * (j[cut] + 1) // period[cut]
    some = cut_lo[at] < cut_hi[at]
    run = np.concatenate([whole, cut[some]])
    step = np.concatenate([period[whole], np.ones(some.sum(), dtype=np.int64)])
    lo, hi = np.concatenate([whole_lo, cut_lo[some]]), np.concatenate([whole_hi, cut_hi[some]])
    return run, lo, hi, step


def _number(side: Side, groups: list[Ints], rank: int) -> Ints:
    """The number of a rank, which may be -1 for none, in each group of a product."""
    if rank < 0:
        return np.full(prod(map(len, groups)), NOBODY)
    return side.number(opened(groups), np.array(rank)).reshape(-1)


def counted(count: Ints) -> tuple[Ints, Ints]:
    """(i, j) for every i and every j < count[i]."""
    return expand(np.zeros_like(count), count)
