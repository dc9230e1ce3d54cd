"""The checks of a proof that read rows: whole sides, joins, lost ranks. Floor 1.

Called by `verify` once the layouts and the flows are sound. What several classes share is looked at
once, and a fault that they share is listed once.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardloop.layout.layout import Box, Layout, LocalTensor
from shardloop.layout.strips import OWN
from shardloop.layout.tables import Cut, Mesh
from shardloop.reshard.flow import Flow
from shardloop.reshard.plan import Plan
from shardloop.reshard.proof.cover import holes
from shardloop.reshard.proof.declared import Rows, box_text, declared_rows, dims_text, product_of
from shardloop.reshard.proof.joins import MOST_FAULTS, Block, block_faults
from shardloop.reshard.proof.living import dead_boxes


def content_faults(plan: Plan) -> Iterator[str]:
    """A text for each fault, with the classes that have it."""
    tables = _Tables()
    keys_of: dict[str, list[str]] = {}
    for side, layout in (("source", plan.src), ("destination", plan.dst)):
        for key in layout.model.class_of:
            for fault in tables.missing(layout, key):
                keys_of.setdefault(f"no rank of the {side} holds {fault}", []).append(key)
    lost = [plan.src_ranks.index(rank) for rank in plan.lost]
    for flow in plan.flows:
        for fault in list(tables.faults(flow)) or _dead_texts(flow, lost):
            keys_of.setdefault(fault, []).append(flow.key)
    for fault, keys in keys_of.items():
        names = list(dict.fromkeys(keys))
        more = f" and {len(names) - MOST_FAULTS} more" if len(names) > MOST_FAULTS else ""
        yield f"{', '.join(names[:MOST_FAULTS])}{more}: {fault}"


def _dead_texts(flow: Flow, lost: Sequence[int]) -> Iterator[str]:
    if not lost or not flow.tensor_class.num_elements:
        return
    dims = range(len(flow.tensor_class.domain))
    texts = (
        ", ".join(f"{dims_text((dim,))} {lo}:{hi}" for dim, (lo, hi) in zip(dims, box, strict=True))
        for box in dead_boxes(flow, lost)
    )
    yield from _some("only lost ranks held {}", list(texts))


def _some(text: str, items: list[str]) -> Iterator[str]:
    yield from (text.format(item) for item in items[:MOST_FAULTS])
    if len(items) > MOST_FAULTS:
        yield text.format(f"{len(items) - MOST_FAULTS} more boxes")


class _Tables:
    """Declared rows and faults, each found once for all that share them."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Cut, str], Rows] = {}
        self._holes: dict[Any, list[Box]] = {}
        self._faults: dict[Any, list[str]] = {}

    def faults(self, flow: Flow) -> Iterator[str]:
        """What is wrong with the joins of a flow."""
        for dims, step in zip(flow.blocks, flow.joins, strict=True):
            src, dst = [_cuts_in(dims, t) for t in flow.src], _cuts_in(dims, flow.dst)
            domain = tuple(flow.tensor_class.domain[dim] for dim in dims)
            named = [_known_as(cut, flow.key) for cuts in (*src, dst) for cut in cuts]
            known = (id(step), tuple(named), domain)
            if known not in self._faults:
                block = Block(
                    src=tuple(self._product(cuts, flow.key) for cuts in src),
                    dst=self._product(dst, flow.key),
                    src_axes=_axes(src[0]),
                    dst_axes=_axes(dst),
                    domain=domain,
                )
                self._faults[known] = list(block_faults(step, block))
            yield from (f"{dims_text(dims)}: {fault}" for fault in self._faults[known])

    def missing(self, layout: Layout, key: str) -> Iterator[str]:
        """What no tensor that shows a class has of it: each alone, or else all together."""
        domain = layout.model.class_of[key].domain
        tensors = [tensor for tensor in layout.tensors if key in tensor.keys]
        if any(self._is_whole(tensor, key, domain) for tensor in tensors):
            return
        if len({tuple(cut.dims for cut in tensor.cuts) for tensor in tensors}) > 1:
            yield f"all of it: {[t.template for t in tensors]} have parts of it cut differently"
            return
        num_partial = 0
        for cuts in zip(*(tensor.cuts for tensor in tensors), strict=True):
            found = self._missing(cuts, key, domain)
            yield from _some(f"{dims_text(cuts[0].dims)} {{}}", [box_text(box) for box in found])
            num_partial += any(self._missing((cut,), key, domain) for cut in cuts)
        if len(tensors) > 1 and num_partial > 1:
            yield f"all of it: parts in {[t.template for t in tensors]} differ in several dims"

    def _is_whole(self, tensor: LocalTensor, key: str, domain: Box) -> bool:
        return not any(self._missing((cut,), key, domain) for cut in tensor.cuts)

    def _missing(self, cuts: tuple[Cut, ...], key: str, domain: Box) -> list[Box]:
        """What the rows of all these cuts, of the same dims, leave out."""
        whole = tuple(domain[dim] for dim in cuts[0].dims)
        known = (tuple(_known_as(cut, key) for cut in cuts), whole)
        if known not in self._holes:
            tables = [self._of(cut, key) for cut in cuts]
            lo, hi = (
                np.concatenate(corners)
                for corners in zip(*((t.lo, t.hi) for t in tables), strict=True)
            )
            self._holes[known] = holes(lo, hi, whole)
        return self._holes[known]

    def _product(self, cuts: Sequence[Cut], key: str) -> Rows:
        return product_of([self._of(cut, key) for cut in cuts])

    def _of(self, cut: Cut, key: str) -> Rows:
        known = _known_as(cut, key)
        if known not in self._rows:
            self._rows[known] = declared_rows(*known)
        return self._rows[known]


def _known_as(cut: Cut, key: str) -> tuple[Cut, str]:
    """Cuts that do not tell classes apart have the same rows for all."""
    return cut, key if key in cut.named_keys else OWN


def _cuts_in(dims: tuple[int, ...], tensor: LocalTensor) -> list[Cut]:
    return [cut for cut in tensor.cuts if cut.dims[0] in dims]


def _axes(cuts: Sequence[Cut]) -> Mesh:
    return tuple(axis for cut in cuts for axis in cut.axes)
