"""What moves: flows, the runs of each, and the single transfers written out of them. Floor 1.

Made by `reshard.plan`, `reshard.runs` and `reshard.transfers`; carried out by the executors.

    Flow       one tensor class into one local tensor of the destination
    Runs       boxes of a flow from rank to rank, each for a range of layers
    Transfer   one box of one tensor from rank to rank
"""

import zlib
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from shardloop.families.base import TensorClass
from shardloop.layout.layout import Box, Layout, LocalTensor, View
from shardloop.layout.strips import Ints
from shardloop.reshard.join import Join
from shardloop.reshard.sides import Side

Blocks = tuple[tuple[int, ...], ...]


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
    dtype: str | None
    """Name of the torch dtype in which the tensor is kept; None: the model's."""

    @property
    def num_elements(self) -> int:
        return prod(hi - lo for lo, hi in self.box)


@dataclass(frozen=True, kw_only=True)
class Flow:
    """All that moves of one tensor class into one local tensor of the destination."""

    tensor_class: TensorClass
    src: tuple[LocalTensor, ...]
    """One, or the copies of a tied tensor that are cut alike but for the layer."""
    dst: LocalTensor
    blocks: Blocks
    """The canonical dims in order, as finely apart as the cuts of both sides let them be."""
    joins: tuple[Join, ...]
    """One per block."""

    @property
    def key(self) -> str:
        return self.tensor_class.key

    @cached_property
    def salt(self) -> int:
        """Of the name, so that a plan does not depend on the order of the tensors."""
        return zlib.crc32(self.key.encode())

    @cached_property
    def holders(self) -> Side:
        """The source side: who holds each atom."""
        return Side.of(self.src[0], self.blocks, tuple(step.holders for step in self.joins))

    @cached_property
    def consumers(self) -> Side:
        """The destination side: who wants each cell."""
        return Side.of(self.dst, self.blocks, tuple(step.consumers for step in self.joins))


@dataclass(frozen=True, kw_only=True)
class Route:
    """What flows from the ranks of one layout to the ranks of another."""

    src: Layout
    dst: Layout
    src_ranks: tuple[int, ...]
    """Global rank of each rank of `src`."""
    dst_ranks: tuple[int, ...]
    lost: tuple[int, ...] = ()
    """Source ranks, as global ranks in order, that hold nothing any more."""
    flows: tuple[Flow, ...]
    """One for each tensor class and local tensor of `dst` that shows it."""

    @cached_property
    def src_index(self) -> dict[int, int]:
        """Rank of `src` by global rank; the lost ones have none."""
        indexed = enumerate(self.src_ranks)
        return {rank: index for index, rank in indexed if rank not in self.lost}

    @cached_property
    def dst_index(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.dst_ranks)}

    @cached_property
    def lost_index(self) -> Ints:
        """Ranks of `src` that are lost."""
        return np.array([self.src_ranks.index(rank) for rank in self.lost], dtype=np.int64)

    @cached_property
    def shares_ranks(self) -> bool:
        """Is a rank on both sides?"""
        return bool((self.twin >= 0).any())

    @cached_property
    def twin_of_dst(self) -> Ints:
        """By rank of `dst`: the living rank of `src` that is the same global rank, or -1."""
        twins = (self.src_index.get(rank, -1) for rank in self.dst_ranks)
        return np.fromiter(twins, dtype=np.int64, count=len(self.dst_ranks))

    @cached_property
    def twin(self) -> Ints:
        """By rank of `src`: the rank of `dst` that is the same global rank, or -1."""
        twins = (self.dst_index.get(r, -1) if r in self.src_index else -1 for r in self.src_ranks)
        return np.fromiter(twins, dtype=np.int64, count=len(self.src_ranks))


@dataclass(frozen=True, kw_only=True, eq=False)
class Runs:
    """Boxes of one flow, each from a rank to a rank for a range of layers; arrays by run."""

    flow: Flow
    src: Ints
    """Ranks of the source layout."""
    dst: Ints
    lo: Ints
    """[runs, canonical dims]: the layer first."""
    hi: Ints
    step: Ints
    """Every how many layers."""
    src_row: Ints
    """[runs, blocks]: rows of the joins' source tables."""
    dst_row: Ints

    def __len__(self) -> int:
        return len(self.src)

    @cached_property
    def num_layers(self) -> Ints:
        return -(-(self.hi[:, 0] - self.lo[:, 0]) // self.step)

    @cached_property
    def num_elements(self) -> Ints:
        """Moved by each run, over all its layers."""
        sizes: Ints = np.prod(self.hi[:, 1:] - self.lo[:, 1:], axis=1)
        return self.num_layers * sizes

    @cached_property
    def num_transfers(self) -> Ints:
        """One for each layer and expert."""
        return self.num_layers * (self.hi[:, 1] - self.lo[:, 1])
