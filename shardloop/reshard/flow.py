"""What moves: flows, the runs of each, and the single transfers written out of them. Floor 1.

Made by `reshard.plan` and `reshard.turns`; carried out by the executors.

    Flow       one tensor class into one local tensor of the destination
    Run        one box of a flow from rank to rank, for a range of layers
    Transfer   one box of one tensor from rank to rank
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from shardloop.families.base import TensorClass
from shardloop.layout.layout import Box, Layout, LocalTensor
from shardloop.reshard.join import Join


@dataclass(frozen=True, slots=True)
class View:
    """A box of a local tensor."""

    local_name: str
    slices: tuple[slice, ...]
    shape: tuple[int, ...]

    def of(self, tensors: Mapping[str, Any]) -> Any:
        """The view of `tensors[local_name]`, sharing its memory (numpy or torch)."""
        return tensors[self.local_name][self.slices]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One box of one tensor, from a rank to a rank; a copy in place where both are the same."""

    src_rank: int
    dst_rank: int
    name: str
    """Canonical name."""
    box: Box
    """The elements of the canonical tensor."""
    src: View
    dst: View


@dataclass(frozen=True, kw_only=True)
class Flow:
    """All that moves of one tensor class into one local tensor of the destination."""

    tensor_class: TensorClass
    src: LocalTensor
    dst: LocalTensor
    joins: tuple[Join, ...]
    """One per dim, the layer first."""

    @property
    def key(self) -> str:
        return self.tensor_class.key

    @cached_property
    def salt(self) -> int:
        return zlib.crc32(self.key.encode())


@dataclass(frozen=True, kw_only=True)
class Route:
    """What flows from the ranks of one layout to the ranks of another."""

    src: Layout
    dst: Layout
    src_ranks: tuple[int, ...]
    """Global rank of each rank of `src`."""
    dst_ranks: tuple[int, ...]
    flows: tuple[Flow, ...]
    """One for each tensor class and local tensor of `dst` that shows it."""

    @cached_property
    def src_index(self) -> dict[int, int]:
        """Rank of `src` by global rank."""
        return {rank: index for index, rank in enumerate(self.src_ranks)}

    @cached_property
    def dst_index(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.dst_ranks)}


class Run(NamedTuple):
    """The same box of the same class from one layout rank to another, for a range of layers."""

    flow: Flow
    src: int
    dst: int
    layers: range
    box: Box
    src_starts: tuple[int, ...]
    dst_starts: tuple[int, ...]

    def volume(self) -> int:
        """Elements moved, over all its layers."""
        return len(self.layers) * prod(hi - lo for lo, hi in self.box)
