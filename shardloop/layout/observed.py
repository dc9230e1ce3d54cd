"""The layout of tensors that are there, from their placements; and how two layouts differ. Floor 1.

Called by `parallel.observed`, which reads the placements of live tensors, and by tests. What is
known of a checkpoint is `layout.chunks`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from shardloop.errors import LayoutError
from shardloop.families.base import NUM_NUMBERS, CanonicalModel, TensorClass
from shardloop.layout.layout import Box, Layout, LocalTensor
from shardloop.layout.stages import expert_cut, layer_cut
from shardloop.layout.strips import OWN, split, whole
from shardloop.layout.tables import Axis, Cut, Mesh, make_mesh


@dataclass(frozen=True, slots=True)
class Shard:
    """A tensor's dim cut over an axis in chunks of ceil(n / size)."""

    dim: int
    split_factor: int = 1
    """How many parts later axes of the mesh have cut the dim into before this one does."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One tensor over a mesh."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    mesh: tuple[tuple[str, int], ...]
    """Axes and sizes, outermost first."""
    shards: tuple[Shard | None, ...]
    """For each axis; None: every rank along it has the same."""


def layout_of_placements(model: CanonicalModel, tensors: Mapping[str, Placed]) -> Layout:
    """The layout of tensors under Hugging Face names. Axes of size 1 are left out.

    The result equals `make_layout` where that says the same. A tied head may be given too: it is
    the embedding.

    Raises:
        LayoutError: names are missing or unknown, a shape is not the model's, tensors that differ
            in their layer alone lie differently, or the axes of a dim have no order.
    """
    tensors = dict(tensors)
    if model.tied:
        tensors.pop("lm_head.weight", None)
    faults = name_faults(model, tensors)
    locals_: list[LocalTensor] = []
    for c in [] if faults else model.classes:
        placed = {tensors[name]: name for name in names(c)}
        wrong = [name for p, name in placed.items() if p.shape != c.shape]
        faults += [f"{n} has shape {tensors[n].shape}, it must be {c.shape}" for n in wrong]
        if len(placed) > 1:
            faults.append(f"{' and '.join(list(placed.values())[:2])} lie differently")
        elif not wrong:
            try:
                locals_.append(_placed_tensor(model, c, next(iter(placed))))
            except LayoutError as error:
                faults.append(f"{c.template}: {error}")
    refuse(faults)
    return Layout(spec="placements", model=model, mesh=locals_[0].mesh, tensors=tuple(locals_))


def differences(declared: Layout, observed: Layout) -> list[str]:
    """A line for each tensor of which some rank holds other elements, or that one side lacks.

    Where a rank keeps an element does not count. Equal local tensors are not written out.
    """
    if declared.world_size != observed.world_size:
        return [f"{declared.world_size} ranks are declared, there are {observed.world_size}"]
    common = {*declared.tensors} & {*observed.tensors}
    here, there = (
        replace(side, tensors=tuple(t for t in side.tensors if t not in common))
        for side in (declared, observed)
    )
    found: dict[str, list[str]] = defaultdict(list)
    for rank in range(declared.world_size):
        a, b = _held(here, rank), _held(there, rank)
        for name in {**a, **b}:
            if a.get(name) != b.get(name):
                found[name].append(
                    f"rank {rank} holds {_written(b.get(name))}, declared is "
                    f"{_written(a.get(name))}"
                )
    return [f"{name}: {'; '.join(lines)}" for name, lines in found.items()]


def _held(layout: Layout, rank: int) -> dict[str, list[Box]]:
    boxes: dict[str, list[Box]] = defaultdict(list)
    for piece in layout.pieces(rank):
        boxes[piece.name].append(piece.box)
    return {name: sorted(set(held)) for name, held in boxes.items()}


def _written(boxes: list[Box] | None) -> str:
    texts = ("[" + ", ".join(f"{lo}:{hi}" for lo, hi in box) + "]" for box in boxes or [])
    return " ".join(texts) or "nothing"


def names(c: TensorClass) -> Iterator[str]:
    """Of every layer and expert."""
    for layer, expert in product(range(*c.layers), range(*c.experts)):
        yield c.name(layer, expert)


def name_faults(model: CanonicalModel, tensors: Mapping[str, object]) -> list[str]:
    known = {name for c in model.classes for name in names(c)}
    missing, unknown = sorted(known - {*tensors}), sorted({*tensors} - known)
    return [f"missing: {name}" for name in missing] + [f"unknown: {name}" for name in unknown]


def refuse(faults: Sequence[str]) -> None:
    """Raises LayoutError, if there are any."""
    if faults:
        raise LayoutError("these are not the model's tensors: " + "; ".join(faults))


def _placed_tensor(model: CanonicalModel, c: TensorClass, placed: Placed) -> LocalTensor:
    sizes = [axis for axis in placed.mesh if axis[1] > 1]
    mesh = make_mesh(tuple(sizes or placed.mesh[-1:]))
    axis_of = {axis.name: axis for axis in mesh}
    shards = [
        (axis_of[name], shard)
        for (name, size), shard in zip(placed.mesh, placed.shards, strict=True)
        if shard is not None and size > 1
    ]
    cuts = []
    for dim, size in enumerate(c.shape):
        axes = _in_order([(axis, s.split_factor) for axis, s in shards if s.dim == dim])
        strips = whole(OWN, (0, size))
        for axis in axes:
            strips = split(strips, axis.size)
        cuts.append(Cut((NUM_NUMBERS + dim,), axes, strips))
    numbers = layer_cut(model, c.layers, None), expert_cut(c, None)
    return LocalTensor(template=c.template, keys=(c.key,), mesh=mesh, cuts=(*numbers, *cuts))


def _in_order(shards: Sequence[tuple[Axis, int]]) -> Mesh:
    """Axes in the order in which they cut a dim: from the left, but for a split factor, which says
    how many parts the axes before have made."""
    order: list[Axis] = []
    for axis, factor in reversed(shards):
        before = [n for n in range(len(order) + 1) if prod(a.size for a in order[:n]) == factor]
        if not before:
            raise LayoutError(
                f"axis {axis.name} cuts what is in {factor} parts, but the axes after it make "
                f"{prod(a.size for a in order)}"
            )
        order.insert(before[0], axis)
    return tuple(order)
