"""The layout of tensors that are kept in boxes, each with a holder: what checkpoints list. Floor 1.

Called by whoever plans from the metadata of a checkpoint; holders are ranks, or files by number.

Where the layers and experts are on holders of their own, and holders number stages first, then
experts, then the rest, as ranks do, layers, experts and boxes have an axis each:

    holder = stage x (experts x rest) + part of experts x rest + rest
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from shardloop.families.base import NUM_NUMBERS, CanonicalModel, TensorClass
from shardloop.layout.layout import Layout, LocalTensor
from shardloop.layout.observed import name_faults, names, refuse
from shardloop.layout.strips import OWN, Strips, pick, split, whole
from shardloop.layout.tables import Axis, Cut, make_mesh


class Chunk(NamedTuple):
    """A box of a tensor and who holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    holder: int


Chunks = tuple[Chunk, ...]
Listed = Mapping[tuple[int, int], Chunks]
"""By layer and expert."""


def layout_of_chunks(
    model: CanonicalModel, tensors: Mapping[str, Sequence[Chunk]], *, num_holders: int
) -> Layout:
    """The layout of tensors in boxes: a holder's chunks of a tensor are one local tensor of one
    dim, each read row by row, in the order given.

    A class whose tensors lie differently beyond what numbered holders explain becomes several local
    tensors, which no plan takes as its source.

    Raises:
        LayoutError: names are missing or unknown, a chunk is not within its tensor, or its holder
            not one of `num_holders`.
    """
    faults = name_faults(model, tensors)
    if not faults:
        faults = [f for c in model.classes for f in _chunk_faults(c, tensors, num_holders)]
    refuse(faults)
    found: list[LocalTensor] = []
    for c in model.classes:
        listed = {
            (layer, expert): tuple(tensors[c.name(layer, expert)])
            for layer, expert in product(range(*c.layers), range(*c.experts))
        }
        found += _local_tensors(c, listed, num_holders)
    mesh = make_mesh((("holder", num_holders),))
    return Layout(spec="chunks", model=model, mesh=mesh, tensors=tuple(found))


def _chunk_faults(
    c: TensorClass, tensors: Mapping[str, Sequence[Chunk]], num_holders: int
) -> Iterator[str]:
    for name in names(c):
        for offsets, sizes, holder in tensors[name]:
            ends = [lo + size for lo, size in zip(offsets, sizes, strict=False)]
            fits = len(offsets) == len(sizes) == len(c.shape) and all(
                0 <= lo <= hi <= n for lo, hi, n in zip(offsets, ends, c.shape, strict=True)
            )
            if not fits:
                yield f"{name} of shape {c.shape} has no chunk at {offsets} of size {sizes}"
            if not 0 <= holder < num_holders:
                yield f"{name} is held by {holder}; choose from 0 to {num_holders - 1}"


def _local_tensors(c: TensorClass, listed: Listed, num_holders: int) -> list[LocalTensor]:
    """One if numbers of holders explain how the tensors differ, or one for each way they lie."""
    for block in _divisors(num_holders):
        for rest in _divisors(block):
            if tensor := _product(c, listed, (num_holders // block, block // rest, rest)):
                return [tensor]
    layers_of: dict[tuple[Chunks, ...], list[int]] = defaultdict(list)
    for layer in range(*c.layers):
        layers_of[tuple(listed[layer, e] for e in range(*c.experts))].append(layer)
    found = []
    for row, layers in layers_of.items():
        experts_of: dict[Chunks, list[int]] = defaultdict(list)
        for expert, chunks in zip(range(*c.experts), row, strict=True):
            experts_of[chunks].append(expert)
        for chunks, experts in experts_of.items():
            numbers = dict.fromkeys(layers, 0), dict.fromkeys(experts, 0)
            found.append(_local_tensor(c, numbers, chunks, (1, 1, num_holders)))
    return found


def _product(c: TensorClass, listed: Listed, sizes: tuple[int, int, int]) -> LocalTensor | None:
    """The class as a product of axes of these sizes, if it is one."""
    _, num_expert_parts, rest = sizes
    stages: dict[int, int] = {}
    expert_parts: dict[int, int] = {}
    pattern: Chunks | None = None
    for (layer, expert), chunks in listed.items():
        reduced = tuple(chunk._replace(holder=chunk.holder % rest) for chunk in chunks)
        pattern = reduced if pattern is None else pattern
        outer = {chunk.holder // rest for chunk in chunks}
        if reduced != pattern or len(outer) != 1:
            return None
        stage, part = divmod(outer.pop(), num_expert_parts)
        if stages.setdefault(layer, stage) != stage:
            return None
        if expert_parts.setdefault(expert, part) != part:
            return None
    return _local_tensor(c, (stages, expert_parts), pattern or (), sizes)


def _local_tensor(
    c: TensorClass,
    numbers: tuple[Mapping[int, int], Mapping[int, int]],
    chunks: Chunks,
    sizes: tuple[int, int, int],
) -> LocalTensor:
    stage, part, rest = mesh = make_mesh(
        tuple(zip(("stage", "part", "holder"), sizes, strict=True))
    )
    layers, experts = numbers
    dims = tuple(range(NUM_NUMBERS, NUM_NUMBERS + len(c.dims)))
    return LocalTensor(
        template=c.template,
        keys=(c.key,),
        mesh=mesh,
        cuts=(
            _number_cut(0, stage, layers),
            _number_cut(1, part, experts),
            Cut(dims, (rest,), _strips_of(chunks, rest.size)),
        ),
    )


def _number_cut(dim: int, axis: Axis, part_of: Mapping[int, int]) -> Cut:
    """Layers or experts, each on its part of an axis."""
    numbers = sorted(part_of)
    segments = split(whole(OWN, (numbers[0], numbers[-1] + 1)), numbers[-1] + 1 - numbers[0])
    order = [[n - numbers[0] for n in numbers if part_of[n] == p] for p in range(axis.size)]
    return Cut((dim,), (axis,), pick(segments, order))


def _strips_of(chunks: Sequence[Chunk], num_holders: int) -> Strips:
    held = sorted((c for c in chunks if prod(c.sizes)), key=lambda chunk: chunk.holder)
    part = np.array([chunk.holder for chunk in held], dtype=np.int64)
    num_dims = len(chunks[0].sizes) if chunks else 1
    lo = np.array([chunk.offsets for chunk in held], dtype=np.int64).reshape(-1, num_dims)
    sizes = np.array([chunk.sizes for chunk in held], dtype=np.int64).reshape(-1, num_dims)
    return Strips(num_holders, (OWN,), part, np.zeros_like(part), lo, lo + sizes)


def _divisors(n: int) -> list[int]:
    """Largest first."""
    return [d for d in range(n, 0, -1) if n % d == 0]
