"""One end of a flow: the ranks of a group, numbered. Called by `reshard.turns`. Floor 1.

A group is a product: in each block of dims some parts, and beside them the free ranks, which differ
on axes that no cut uses. Ranks add, so a member's rank is the sum of its parts and its free offset,
and its number counts them in mixed radix, the free offset fastest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardloop.layout.layout import LocalTensor
from shardloop.layout.strips import Ints
from shardloop.layout.tables import Mesh, offsets
from shardloop.reshard.members import Members

NOBODY = 1 << 62
"""The number of a rank that is not in a group: above all others."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Groups of ranks, given by a group of `members` in each block.

    All arguments are broadcast against each other: for a product of groups, give an open grid.
    """

    members: tuple[Members, ...]
    axes: tuple[Mesh, ...]
    """Those that cut each block."""
    free: Ints
    """Offsets of the free ranks, increasing."""

    @staticmethod
    def of(
        tensor: LocalTensor, blocks: Sequence[tuple[int, ...]], members: tuple[Members, ...]
    ) -> "Side":
        axes = [
            tuple(axis for cut in tensor.cuts if cut.dims[0] in block for axis in cut.axes)
            for block in blocks
        ]
        return Side(members=members, axes=tuple(axes), free=np.sort(offsets(tensor.free_axes)))

    def parts(self, ranks: Ints) -> list[Ints]:
        """The part of each rank, by block."""
        return [
            sum(
                (ranks // axis.stride % axis.size * axis.stride for axis in axes),
                np.zeros_like(ranks),
            )
            for axes in self.axes
        ]

    def places_of(self, rank: int) -> list[Ints]:
        """The places of the rank's part, by block."""
        parts = self.parts(np.array(rank))
        return [m.places_of(int(part)) for m, part in zip(self.members, parts, strict=True)]

    def count(self, groups: list[Ints]) -> Ints:
        """How many ranks each group has."""
        count = np.array(len(self.free))
        for members, group in zip(self.members, groups, strict=True):
            count = count * members.count[group]
        return count

    def number(self, groups: list[Ints], ranks: Ints) -> Ints:
        """The number of each rank within a group, or NOBODY."""
        number, inside = np.array(0), np.array(True)
        parts = self.parts(ranks)
        for members, group, part in zip(self.members, groups, parts, strict=True):
            if members.most > 1:
                found = members.find(group, part)
                number = number * members.count[group] + found
                inside = inside & (found >= 0)
            else:
                inside = inside & (members.part[members.start[group]] == part)
        free = np.searchsorted(self.free, ranks - sum(parts))
        return np.where(inside, number * len(self.free) + free, NOBODY)

    def at(self, groups: list[Ints], number: Ints) -> tuple[Ints, list[Ints]]:
        """The ranks with these numbers, and their places by block."""
        number, free = np.divmod(number, len(self.free))
        ranks, places = self.free[free], []
        for members, group in zip(reversed(self.members), reversed(groups), strict=True):
            place = members.start[group]
            if members.most > 1:
                number, found = np.divmod(number, members.count[group])
                place = place + found
            places.append(place)
            ranks = ranks + members.part[place]
        return ranks, places[::-1]
