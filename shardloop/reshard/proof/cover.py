"""Do boxes make up other boxes, each element exactly once? Called by a proof's checks. Floor 1.

Along one dim this is a matter of sorting, and exact. Along several it is decided by a random
measure. Every end x of a box along a dim gets a random number R(x) modulo the prime P = 2**31 - 1,
and the measure of a box is the product over its dims of R(hi) - R(lo). Boxes that make up a row
have the measure of the row. If some element is counted not once but never, or twice, or lies
outside, then the difference of the two sides is a polynomial in these numbers that is not zero and
of degree 1 in each of the k dims, so it vanishes with probability at most k / P (Schwartz 1980,
Zippel 1979).

Two independent measures must agree: a fault escapes with probability below 2**-58 per row at
k = 4, and below 2**-41 in a plan of 100,000 rows, whichever plan it is. That holds for plans made
before the numbers are drawn, so they come from the operating system anew each time: no plan, not
even one made to deceive, can be fitted to them. A sound plan is never refused.
"""

from collections.abc import Iterator

import numpy as np

from shardloop.layout.layout import Box
from shardloop.layout.strips import Ints, expand

P = 2**31 - 1
NUM_MEASURES = 2


def wrong_rows(row: Ints, lo: Ints, hi: Ints, row_lo: Ints, row_hi: Ints) -> Ints:
    """The rows that the boxes do not make up exactly once.

    Args:
        row: [n], the row that each box is for.
        lo, hi: [n, k], the boxes.
        row_lo, row_hi: [rows, k], what each row must be made up of; within the dims of the model.
    """
    bad = np.zeros(len(row_lo), dtype=bool)
    outside = (lo < row_lo[row]) | (hi > row_hi[row]) | (lo >= hi)
    bad[row[outside.any(axis=1)]] = True
    if lo.shape[1] == 1:
        bad |= _broken_chains(row, lo[:, 0], hi[:, 0], row_lo[:, 0], row_hi[:, 0])
    else:
        lo, hi = (np.clip(ends, row_lo[row], row_hi[row]) for ends in (lo, hi))
        bad |= _differing_measures(row, lo, hi, row_lo, row_hi)
    return np.flatnonzero(bad)


def _broken_chains(row: Ints, lo: Ints, hi: Ints, row_lo: Ints, row_hi: Ints) -> Ints:
    """Sorted, the runs of a row must follow each other without gap from its start to its end."""
    same = row[1:] == row[:-1]
    if not ((row[1:] > row[:-1]) | (same & (lo[1:] > lo[:-1]))).all():
        order = np.lexsort((lo, row))
        row, lo, hi = row[order], lo[order], hi[order]
        same = row[1:] == row[:-1]
    first, last = np.ones(len(row), dtype=bool), np.ones(len(row), dtype=bool)
    first[1:], last[:-1] = ~same, ~same
    bad = np.ones(len(row_lo), dtype=bool)
    bad[row] = False
    bad[row[1:][same & (lo[1:] != hi[:-1])]] = True
    bad[row[first & (lo != row_lo[row])]] = True
    bad[row[last & (hi != row_hi[row])]] = True
    return bad


def _differing_measures(row: Ints, lo: Ints, hi: Ints, row_lo: Ints, row_hi: Ints) -> Ints:
    rng = np.random.default_rng()
    of_boxes = np.ones((NUM_MEASURES, len(lo)), dtype=np.int64)
    of_rows = np.ones((NUM_MEASURES, len(row_lo)), dtype=np.int64)
    for dim in range(lo.shape[1]):
        ends = [corners[:, dim] for corners in (lo, hi, row_lo, row_hi)]
        points = np.unique(np.concatenate(ends))  # none of the others is asked for
        random = rng.integers(0, P, size=(NUM_MEASURES, len(points)))
        first, last, row_first, row_last = (random[:, np.searchsorted(points, x)] for x in ends)
        of_boxes = of_boxes * ((last - first) % P) % P
        of_rows = of_rows * ((row_last - row_first) % P) % P
    total = np.zeros_like(of_rows)
    for measures, sums in zip(of_boxes, total, strict=True):
        np.add.at(sums, row, measures)
    return (total % P != of_rows).any(axis=0)


def holes(lo: Ints, hi: Ints, domain: Box) -> list[Box]:
    """What boxes, which may overlap, leave out of a domain that they lie in."""
    if len(domain) == 1:
        return [(run,) for run in _gaps(lo[:, 0], hi[:, 0], domain[0])]
    whole = np.array(domain, dtype=np.int64).T
    for boxes in (np.concatenate([lo, hi], axis=1), _distinct(lo, hi)):
        first, last = np.split(boxes, 2, axis=1)
        one_row = np.zeros(len(boxes), dtype=np.int64)
        if not len(wrong_rows(one_row, first, last, whole[:1], whole[1:])):
            return []
    first, last = np.concatenate([whole[:1], first]), np.concatenate([whole[1:], last])
    return [box for box, members in sweep(first, last) if len(members) == 1]


def _distinct(lo: Ints, hi: Ints) -> Ints:
    return np.unique(np.concatenate([lo, hi], axis=1), axis=0)


def _gaps(lo: Ints, hi: Ints, domain: tuple[int, int]) -> list[tuple[int, int]]:
    order = np.argsort(lo)
    starts = np.append(lo[order], domain[1])
    reached = np.maximum.accumulate(np.append(domain[0], hi[order]))
    return [(int(reached[i]), int(starts[i])) for i in np.flatnonzero(starts > reached)]


def sweep(lo: Ints, hi: Ints) -> Iterator[tuple[Box, Ints]]:
    """Cut the boxes at each other's ends: each smallest box, and which boxes it lies in. Exact.

    Much slower than `wrong_rows`: it names the elements when something is wrong, and tests compare
    with it.
    """
    points = np.unique(np.concatenate([lo[:, 0], hi[:, 0]]))
    box, slab = expand(np.searchsorted(points, lo[:, 0]), np.searchsorted(points, hi[:, 0]))
    order = np.argsort(slab, kind="stable")
    box, start = box[order], np.searchsorted(slab[order], np.arange(len(points)))
    for index in range(len(points) - 1):
        inside = box[start[index] : start[index + 1]]
        run = (int(points[index]), int(points[index + 1]))
        if lo.shape[1] == 1:
            yield (run,), inside
            continue
        for rest, members in sweep(lo[inside, 1:], hi[inside, 1:]):
            yield (run, *rest), inside[members]
