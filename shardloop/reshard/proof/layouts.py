"""The checks of a proof that concern one layout: ranks, meshes, cuts, names. Floor 1.

Called by `verify` for both sides of a plan. Each fault is a text.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from shardloop.layout.layout import NUMBERS, Layout, LocalTensor
from shardloop.layout.strips import OWN, PADDING, Ints, Strips
from shardloop.layout.tables import Cut, Mesh
from shardloop.reshard.proof.declared import declared_rows, part_of_index

NUMBER = re.compile(r"(?:{\w+}|-?\d+)+")
"""Where a template has numbers, written out or not."""


def layout_faults(layout: Layout, ranks: tuple[int, ...]) -> Iterator[str]:
    """What is wrong with a layout on these global ranks, whatever is planned from or to it."""
    yield from mesh_faults(layout.mesh, layout.world_size)
    if len(ranks) != layout.world_size or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        yield f"ranks {list(ranks)} are not {layout.world_size} different ranks >= 0"
    faults = [text for tensor in layout.tensors for text in _tensor_faults(layout, tensor)]
    yield from faults
    if not faults:
        yield from _name_faults(layout)


def mesh_faults(mesh: Mesh, world_size: int) -> Iterator[str]:
    """With strides 1, n1, n1 n2, ... each rank has one place in the mesh; axes of size 1 are free
    to have any."""
    expected = 1
    for axis in sorted(mesh, key=lambda axis: axis.stride):
        if min(axis.size, axis.stride) < 1 or (axis.size > 1 and axis.stride != expected):
            yield (
                f"mesh: axis {axis.name} has size {axis.size} and stride {axis.stride}; "
                f"its stride must be {expected}"
            )
        expected *= axis.size
    if expected != world_size:
        yield f"mesh: sizes {[axis.size for axis in mesh]} do not make {world_size} ranks"


def _tensor_faults(layout: Layout, tensor: LocalTensor) -> Iterator[str]:
    here = tensor.template
    yield from (f"{here}: {text}" for text in mesh_faults(tensor.mesh, layout.world_size))
    for name in [key for key in tensor.keys if key not in layout.model.class_of]:
        yield f"{here}: the model has no {name}"
    named = [f"{{{what}}}" for what in NUMBERS[: tensor.num_naming]]
    if set("{}") & set(re.sub("|".join(map(re.escape, named)), "", here)):
        yield f"{here}: its name can have no fields but {' and '.join(named)}"
    dims = [dim for cut in tensor.cuts for dim in cut.dims]
    wanted = {len(c.domain) for c in layout.model.classes if c.key in tensor.keys}
    if {len(dims)} != wanted or dims != list(range(len(dims))):
        yield f"{here}: its cuts cover dims {dims}, its classes have {sorted(wanted)} in this order"
    elif [cut.dims for cut in tensor.cuts[:2]] != [(0,), (1,)]:
        yield f"{here}: layer and expert must have a cut of their own"
    used = Counter(axis for cut in tensor.cuts for axis in cut.axes)
    for axis, count in used.items():
        if axis not in tensor.mesh:
            yield f"{here}: axis {axis} is not in its mesh {tensor.mesh}"
        if count > 1:
            yield f"{here}: axis {axis.name} cuts {count} dims"
    faults = [text for cut in tensor.cuts for text in _strip_faults(cut)]
    yield from (f"{here}: {text}" for text in faults or _class_faults(tensor))


def _strip_faults(cut: Cut) -> Iterator[str]:
    """Segments in order of parts and not empty follow each other without gap, so places add up."""
    strips = cut.strips
    columns = (strips.part, strips.key, strips.lo, strips.hi)
    line, box = strips.part.shape[:1], (*strips.part.shape[:1], len(cut.dims))
    kinds = [f"{column.dtype} {column.shape}" for column in columns]
    if kinds != [f"int64 {shape}" for shape in (line, line, box, box)]:
        yield f"its strips have columns {', '.join(kinds)} for {len(cut.dims)} dims"
        return
    num_parts = prod(axis.size for axis in cut.axes)
    if strips.num_parts != num_parts:
        yield f"{strips.num_parts} strips for {num_parts} parts"
    if not _in_order(strips) or (strips.lo >= strips.hi).any():
        yield "its strips have segments that are empty, out of order or of no part or class"


def _in_order(strips: Strips) -> bool:
    part, key = strips.part, strips.key
    inside = (part >= 0) & (part < strips.num_parts) & (key >= PADDING) & (key < len(strips.keys))
    return bool(inside.all() and (part[1:] >= part[:-1]).all())


def _class_faults(tensor: LocalTensor) -> Iterator[str]:
    """No local element may belong to two classes, or to one that the tensor does not show."""
    telling = [cut for cut in tensor.cuts if cut.named_keys]
    if len(telling) > 1 or (len(tensor.keys) > 1 and not telling):
        yield f"{len(telling)} of its dims tell its {len(tensor.keys)} classes apart"
    for cut in telling:
        if others := cut.named_keys - set(tensor.keys):
            yield f"its strips name {sorted(others)}, which it does not show"
        own = [i for i, name in enumerate(cut.strips.keys) if name == OWN]
        if len(tensor.keys) > 1 and np.isin(cut.strips.key, own).any():
            yield f"some of its segments belong to all of {', '.join(tensor.keys)}"


def _name_faults(layout: Layout) -> Iterator[str]:
    """Names that a rank would give to two tensors.

    Numbers apart, few templates look alike; only of these are the names written out.
    """
    alike: dict[str, list[LocalTensor]] = {}
    for tensor in layout.tensors:
        alike.setdefault(NUMBER.sub("#", tensor.template), []).append(tensor)
    for tensors in alike.values():
        for tensor in tensors:
            for cut, what in zip(tensor.naming, NUMBERS, strict=False):
                runs = _numbers(tensor, cut)
                named = f"{{{what}}}" in tensor.template
                if _overlap(runs) if named else _several(runs):
                    yield (
                        f"{tensor.template}: some ranks give several {what}s one name; its template"
                        f" needs {{{what}}}, and each {what} a single place on a rank"
                    )
        yield from _shared_names(
            [t for t in tensors if any(_may_coincide(t, other) for other in tensors)]
        )


def _may_coincide(a: LocalTensor, b: LocalTensor) -> bool:
    """Could a name of one be a name of the other, or two of its own be one? Numbers are aligned."""
    if a is b:
        return "}{" in a.template
    runs = zip(NUMBER.findall(a.template), NUMBER.findall(b.template), strict=True)
    return all(x == y or "{" in x + y for x, y in runs)


class _Runs(NamedTuple):
    """The numbers first, ..., last - 1 in the names of ranks of a part."""

    part: Ints
    first: Ints
    last: Ints


def _numbers(tensor: LocalTensor, cut: Cut) -> _Runs:
    tables = [declared_rows(cut, key) for key in cut.named_keys or tensor.keys[:1]]
    part = np.concatenate([table.part for table in tables])
    first = np.concatenate([(t.loc if tensor.local_numbers else t.lo)[:, 0] for t in tables])
    return _Runs(part, first, first + np.concatenate([(t.hi - t.lo)[:, 0] for t in tables]))


def _several(runs: _Runs) -> bool:
    return len(runs.part) > 0 and bool((np.bincount(runs.part, runs.last - runs.first) > 1).any())


def _overlap(runs: _Runs) -> bool:
    order = np.lexsort((runs.first, runs.part))
    part, first, last = (column[order] for column in runs)
    return bool(((part[1:] == part[:-1]) & (first[1:] < last[:-1])).any())


def _shared_names(tensors: list[LocalTensor]) -> Iterator[str]:
    ranks: dict[str, list[Ints]] = {}
    for tensor in tensors:
        used = {axis for cut in tensor.naming for axis in cut.axes}
        others = tuple(axis for axis in tensor.mesh if axis not in used)
        rest = part_of_index(others, np.arange(prod(axis.size for axis in others)))
        tables = [zip(*_numbers(tensor, cut), strict=True) for cut in tensor.naming]
        for runs in product(*tables):
            part = sum(run[0] for run in runs)
            for numbers in product(*(range(run[1], run[2]) for run in runs)):
                fields = dict(zip(NUMBERS, numbers, strict=False))
                ranks.setdefault(tensor.template.format(**fields), []).append(rest + part)
    for name, lists in ranks.items():
        found, count = np.unique(np.concatenate(lists), return_counts=True)
        if (count > 1).any():
            yield f"{name}: several layers or tensors share this name on rank {found[count > 1][0]}"
