"""Groups of ranks' parts: who holds an atom, who wants a cell. Floor 1.

Made by `reshard.join`.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardloop.layout.strips import Ints, read_only


@dataclass(frozen=True, eq=False)
class Members:
    """The members of numbered groups, one after the other; a *place* is an index of `part`."""

    start: Ints
    """Members of group g are at places start[g] to start[g + 1]."""
    part: Ints
    """Increasing within each group."""

    def __post_init__(self) -> None:
        read_only(self.start)
        read_only(self.part)

    @cached_property
    def count(self) -> Ints:
        return read_only(np.diff(self.start))

    @cached_property
    def most(self) -> int:
        """Members of the largest group."""
        return int(self.count.max(initial=0))

    @cached_property
    def group(self) -> Ints:
        """Of each place."""
        return read_only(np.repeat(np.arange(len(self.count)), self.count))

    def find(self, group: Ints, part: Ints) -> Ints:
        """The number of `part` within `group`, counted from 0, or -1; both are broadcast."""
        key = group * self._width + np.minimum(part, self._width - 1)
        place = np.searchsorted(self._key, key)
        found = self._key[np.minimum(place, len(self._key) - 1)] == key
        return np.where(found, place - self.start[group], -1)

    def places_of(self, part: int) -> Ints:
        """Where `part` is a member, in order."""
        first, last = np.searchsorted(self._sorted_part, [part, part + 1])
        return self._by_part[first:last]

    @cached_property
    def _width(self) -> int:
        return int(self.part.max(initial=0)) + 2

    @cached_property
    def _key(self) -> Ints:
        return read_only(self.group * self._width + self.part)

    @cached_property
    def _by_part(self) -> Ints:
        return read_only(np.argsort(self.part, kind="stable"))

    @cached_property
    def _sorted_part(self) -> Ints:
        return read_only(self.part[self._by_part])
