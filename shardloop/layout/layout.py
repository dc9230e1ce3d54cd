"""A layout: which element of which tensor each rank holds, and where. Floor 1.

Made by `shardloop.layout.make_layout`; read by the planner, the executors and whoever allocates
local tensors. Nothing in it grows with the number of ranks x tensors: one rank's pieces are
written out when asked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

from shardloop.families.base import NUM_NUMBERS, CanonicalModel
from shardloop.layout.strips import OWN, PADDING
from shardloop.layout.tables import Cut, Mesh

Box = tuple[tuple[int, int], ...]
NUMBERS = ("layer", "expert")
"""What the first dims of every class are called in name templates."""


def box_of(array: Any, box: Box) -> Any:
    """A view of the elements of `array` (numpy or torch) in `box`."""
    return array[tuple(slice(lo, hi) for lo, hi in box)]


@dataclass(frozen=True, slots=True)
class View:
    """A box of canonical elements within a local tensor."""

    local_name: str
    slices: tuple[slice | int, ...]
    """Of the local tensor, one per local dim."""
    shape: tuple[int, ...]
    """What is sliced, read row by row, as a box."""
    inner: tuple[slice, ...]
    """The wanted part of that box; all of it where it is empty."""

    def of(self, tensors: Mapping[str, Any]) -> Any:
        """The view of `tensors[local_name]`, sharing its memory (numpy or torch)."""
        return tensors[self.local_name][self.slices].reshape(self.shape)[self.inner]

    def under(self, local_name: str) -> "View":
        """The same elements of another local tensor."""
        return View(local_name, self.slices, self.shape, self.inner)


@dataclass(frozen=True, kw_only=True)
class LocalTensor:
    """The local tensors of all layers (and experts) under one name template."""

    template: str
    keys: tuple[str, ...]
    """The classes it shows: several where they are fused."""
    mesh: Mesh
    """Its axes, a factorisation of all ranks; tensors of one layout may have different ones."""
    cuts: tuple[Cut, ...]
    """Together they cover all dims, in order; the layer has one of its own, and so has the expert.
    At most one of them tells the classes apart. Each cut of a tensor's own dims is a local dim."""
    stacked: bool = False
    """The expert is a local dim, the first, instead of a number in the name."""
    local_numbers: bool = False
    """Numbers in names count what the rank holds, from 0, instead of what the model has."""

    @property
    def naming(self) -> tuple[Cut, ...]:
        """The cuts whose dim is a number in the name."""
        return self.cuts[: self.num_naming]

    @property
    def num_naming(self) -> int:
        return NUM_NUMBERS - self.stacked

    @cached_property
    def free_axes(self) -> Mesh:
        """Axes that no cut uses: ranks that differ on them hold copies."""
        used = {axis for cut in self.cuts for axis in cut.axes}
        return tuple(axis for axis in self.mesh if axis not in used)

    def local_name(self, numbers: Mapping[str, int]) -> str:
        return self.template.format(**numbers)

    def names(self, rank: int) -> list[tuple[int, str]]:
        """Layer and name of each tensor that `rank` has under this template."""
        found = []
        for rows in product(*(rows_of(cut, rank) for cut in self.naming)):
            runs = [range(*row.box[0]) for row in rows]
            for numbers in product(*runs):
                found.append((numbers[0], self.name(rows, numbers)))
        return found

    def name(self, rows: Sequence["Row"], numbers: Sequence[int]) -> str:
        """
        Args:
            rows: one per naming cut.
            numbers: layer and expert in the model, each within its row.
        """
        if self.local_numbers:
            places = zip(numbers, rows, strict=False)
            numbers = [n - row.box[0][0] + row.loc for n, row in places]
        return self.template.format(**dict(zip(NUMBERS, numbers, strict=False)))

    def shape(self, rank: int) -> tuple[int, ...]:
        return tuple(
            int(cut.strips.length[cut.index(rank)]) for cut in self.cuts[self.num_naming :]
        )


class Row(NamedTuple):
    """A segment of a rank's strip that is no padding."""

    key: str
    box: Box
    loc: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a canonical tensor, and where a rank holds it."""

    rank: int
    view: View
    name: str
    box: Box

    @property
    def local_name(self) -> str:
        return self.view.local_name

    def of(self, tensors: Mapping[str, Any]) -> Any:
        """The elements of `box` as a view of the rank's local tensor, in the shape of `box`."""
        return self.view.of(tensors)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What each of `world_size` ranks holds of a model. Ranks count from 0 within the layout."""

    spec: str
    model: CanonicalModel
    mesh: Mesh
    tensors: tuple[LocalTensor, ...]

    @cached_property
    def world_size(self) -> int:
        return prod(axis.size for axis in self.mesh)

    def local_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that `rank` holds, empty shards included, by layer."""
        return {name: tensor.shape(rank) for name, tensor in self._held(rank)}

    def local_dtypes(self, rank: int) -> dict[str, str | None]:
        """Name and dtype of the same tensors; None is the model's own."""
        return {
            name: self.model.class_of[tensor.keys[0]].dtype for name, tensor in self._held(rank)
        }

    def _held(self, rank: int) -> Iterator[tuple[str, LocalTensor]]:
        self._check_rank(rank)
        held = [
            (layer, index, name)
            for index, tensor in enumerate(self.tensors)
            for layer, name in tensor.names(rank)
        ]
        for _, index, name in sorted(held, key=lambda item: item[:2]):
            yield name, self.tensors[index]

    def pieces(self, rank: int) -> Iterator[Piece]:
        """What `rank` holds, box by box. Padding belongs to no piece."""
        self._check_rank(rank)
        for tensor in self.tensors:
            for combination in product(*(rows_of(cut, rank) for cut in tensor.cuts)):
                yield from self._pieces_of(tensor, rank, combination)

    def _pieces_of(
        self, tensor: LocalTensor, rank: int, combination: tuple[Row, ...]
    ) -> Iterator[Piece]:
        named = [row.key for row in combination if row.key != OWN]
        tensor_class = self.model.class_of[named[0] if named else tensor.keys[0]]
        box = tuple(run for row in combination for run in row.box)
        layers, experts, *own = box
        for layer, expert in product(range(*layers), range(*experts)):
            view = view_of(tensor, combination, (layer, expert))
            yield Piece(rank, view, tensor_class.name(layer, expert), tuple(own))

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise IndexError(
                f"layout {self.spec} has no rank {rank}; choose from 0 to {self.world_size - 1}"
            )


def view_of(
    tensor: LocalTensor, rows: tuple[Row, ...], numbers: tuple[int, int], inner: Box = ()
) -> View:
    """Where one canonical tensor's share of a product of rows (one per cut) lies.

    Args:
        numbers: its layer and expert, each in the rows of these dims.
        inner: the wanted part, in elements of the canonical tensor; all where it is empty.
    """
    slices: list[slice | int] = []
    shape: list[int] = []
    if tensor.stacked:
        expert = rows[1]
        slices.append(expert.loc + numbers[1] - expert.box[0][0])
    for row in rows[NUM_NUMBERS:]:
        sizes = [hi - lo for lo, hi in row.box]
        slices.append(slice(row.loc, row.loc + prod(sizes)))
        shape += sizes
    own = [run for row in rows[NUM_NUMBERS:] for run in row.box]
    wanted = tuple(slice(lo - a, hi - a) for (lo, hi), (a, _) in zip(inner, own, strict=False))
    return View(tensor.name(rows, numbers), tuple(slices), tuple(shape), wanted)


def rows_of(cut: Cut, rank: int) -> list[Row]:
    """The segments of a rank's strip, without padding, in order."""
    strips, index = cut.strips, cut.index(rank)
    found = []
    for s in range(int(strips.start[index]), int(strips.start[index + 1])):
        if (key := int(strips.key[s])) != PADDING:
            box = tuple(zip(strips.lo[s].tolist(), strips.hi[s].tolist(), strict=True))
            found.append(Row(strips.keys[key], box, int(strips.loc[s])))
    return found
