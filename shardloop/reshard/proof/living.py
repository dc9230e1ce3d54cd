"""Does a plan find a living holder for everything, when source ranks are lost? Floor 1.

Called by `verify`. The holders of a product of atoms, one of each block, are themselves a product:
of the atoms' parts and of the free ranks. Where there are more of them than ranks are lost, one
lives. Elsewhere only the atoms held by parts of lost ranks alone can have lost all their holders.
"""

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from shardloop.layout.layout import Box, LocalTensor
from shardloop.reshard.flow import Flow
from shardloop.reshard.join import Join
from shardloop.reshard.proof.declared import part_of_index

Place = tuple[int, ...]
"""Of a rank: its part in each block, then its offset on the free axes."""


def dead_boxes(flow: Flow, lost: Sequence[int]) -> Iterator[Box]:
    """Boxes of the class that lost ranks of the source layout alone held; joins are sound."""
    tensor = flow.src[0]
    free = {int(f) for f in part_of_index(tensor.free_axes, np.arange(_size(tensor)))}
    fewest = prod(int(np.diff(step.holder_start).min()) for step in flow.joins)
    if fewest * len(free) > len(lost):
        return
    places = {_place(flow, rank) for rank in lost}
    yield from _dead(flow.joins, places, free)


def _size(tensor: LocalTensor) -> int:
    return prod(axis.size for axis in tensor.free_axes)


def _place(flow: Flow, rank: int) -> Place:
    tensor = flow.src[0]
    parts = [
        sum(cut.part(rank) for cut in tensor.cuts if cut.dims[0] in block) for block in flow.blocks
    ]
    return (*parts, rank - sum(parts))


def _dead(joins: Sequence[Join], lost: set[Place], free: set[int]) -> Iterator[Box]:
    """Boxes whose holders are all among `lost`, places in the remaining blocks."""
    if not lost:
        return
    if not joins:
        if free <= {place[0] for place in lost}:
            yield ()
        return
    step, *rest = joins
    rest_of: dict[int, set[Place]] = {}
    for first, *others in lost:
        rest_of.setdefault(first, set()).add(tuple(others))
    part = step.src.part[step.holder_row]
    is_lost = np.isin(part, list(rest_of))
    all_lost = np.logical_and.reduceat(is_lost, step.holder_start[:-1])
    found: dict[frozenset[int], list[Box]] = {}
    for atom in np.flatnonzero(all_lost).tolist():
        holders = frozenset(part[step.holder_start[atom] : step.holder_start[atom + 1]].tolist())
        if holders not in found:
            common = set.intersection(*(rest_of[holder] for holder in holders))
            found[holders] = list(_dead(rest, common, free))
        corners = zip(step.atom_lo[atom].tolist(), step.atom_hi[atom].tolist(), strict=True)
        box = tuple(corners)
        yield from ((*box, *others) for others in found[holders])
