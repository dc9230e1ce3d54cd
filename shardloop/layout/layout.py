"""A layout: which element of which tensor each rank holds, and where. Floor 1.

Made by `shardloop.layout.make_layout`; read by the planner, the executors and whoever allocates
local tensors. Nothing in it grows with the number of ranks x tensors: one rank's pieces are
written out when asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

from shardloop.families.base import CanonicalModel
from shardloop.layout.strips import OWN, Segment, Strip, length
from shardloop.layout.tables import Axis, Cut

Box = tuple[tuple[int, int], ...]


def box_of(array: Any, box: Box) -> Any:
    """A view of the elements of `array` (numpy or torch) in `box`."""
    return array[tuple(slice(lo, hi) for lo, hi in box)]


@dataclass(frozen=True, kw_only=True)
class LocalTensor:
    """The local tensors of all layers under one name template."""

    template: str
    keys: tuple[str, ...]
    """The classes it shows: several where an engine fuses them."""
    cuts: tuple[Cut, ...]
    """One per dim; the layer is the first. At most one of them tells its classes apart."""

    def axes(self) -> set[Axis]:
        return {axis for cut in self.cuts for axis in cut.axes}

    def free_axes(self, mesh: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Axes that no cut uses: ranks that differ on them hold copies."""
        used = self.axes()
        return tuple(axis for axis in mesh if axis not in used)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a local tensor that holds a box of a canonical tensor, of the same shape."""

    rank: int
    local_name: str
    local_box: Box
    name: str
    box: Box


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What each of `world_size` ranks holds of a model. Ranks count from 0 within the layout."""

    spec: str
    model: CanonicalModel
    mesh: tuple[Axis, ...]
    tensors: tuple[LocalTensor, ...]

    @cached_property
    def world_size(self) -> int:
        return prod(axis.size for axis in self.mesh)

    def local_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `rank` holds, empty shards included."""
        self._check_rank(rank)
        found = []
        for index, tensor in enumerate(self.tensors):
            layers, *strips = (cut.strip(rank) for cut in tensor.cuts)
            shape = tuple(length(strip) for strip in strips)
            found += [(layer, index, shape) for run in layers for layer in range(run.lo, run.hi)]
        return {
            self.tensors[index].template.format(layer=layer): shape
            for layer, index, shape in sorted(found)
        }

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What `rank` holds, box by box. Padding belongs to no piece."""
        self._check_rank(rank)
        for tensor in self.tensors:
            layers, *dims = (_placed(cut.strip(rank)) for cut in tensor.cuts)
            for combination in product(*dims):
                key = _key_of(tensor, combination)
                local_box = tuple((loc, loc + s.hi - s.lo) for loc, s in combination)
                box = tuple((s.lo, s.hi) for _, s in combination)
                tensor_class = self.model.class_of[key]
                for layer in (n for _, run in layers for n in range(run.lo, run.hi)):
                    local_name = tensor.template.format(layer=layer)
                    yield Piece(rank, local_name, local_box, tensor_class.name(layer), box)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise IndexError(
                f"layout {self.spec} has no rank {rank}; choose from 0 to {self.world_size - 1}"
            )


def _placed(strip: Strip) -> list[tuple[int, Segment]]:
    """Each segment with its place in the local dim, without padding."""
    placed, loc = [], 0
    for segment in strip:
        if segment.key is not None:
            placed.append((loc, segment))
        loc += segment.hi - segment.lo
    return placed


def _key_of(tensor: LocalTensor, combination: tuple[tuple[int, Segment], ...]) -> str:
    named = [segment.key for _, segment in combination if segment.key not in (None, OWN)]
    return named[0] if named and named[0] is not None else tensor.keys[0]
