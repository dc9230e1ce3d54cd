"""Proof that a plan writes every destination element exactly once, from the right element. Floor 1.

Called by whoever wants to execute a plan: executors take a `Proof`, and only `verify` makes one. It
shares no code with the planner: it reads the layouts' strips and the plan's numbers, and never
enumerates ranks x tensors. It checks, once for each join however many layers share it:

    names     no two layers or tensors of a side share a name on the ranks
    mesh      strides are exactly those of the mesh, so (parts, free coordinates) <-> rank is 1 : 1
    flows     every class that the destination shows has one flow, from a tensor that shows it
    tables    the rows planned with are the rows declared: nobody's place (`loc`) is invented
    whole     the destination's rows, all parts together, leave out no element
    cover     the pairs of each destination row make up its run exactly once, end to end
    held      each pair lies in its atom, and each holder's row contains the atom
    turns     the consumers of a cell are numbered 0, 1, ... so that both ends solve the same turn

A box is a product of runs, one per dim, and each cut covers one dim; so covers per dim multiply to
the cover of the whole tensor, and these checks are exact, not sampled.
"""

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

from shardloop.errors import PlanError
from shardloop.layout.layout import Layout, LocalTensor
from shardloop.layout.strips import OWN
from shardloop.layout.tables import Cut
from shardloop.reshard.checks import dim_faults
from shardloop.reshard.flow import Flow
from shardloop.reshard.plan import Plan

_SEAL = object()


class Proof:
    """A plan that has been verified. Only `verify` makes one; unpickling verifies again."""

    __slots__ = ("digest", "num_joins", "num_pairs", "plan")

    plan: Plan
    digest: str
    """Content hash of the plan that was proved."""
    num_joins: int
    num_pairs: int

    def __init__(self, seal: object, plan: Plan, num_joins: int, num_pairs: int) -> None:
        if seal is not _SEAL:
            raise TypeError("a Proof cannot be made by hand; call verify(plan)")
        values = {"plan": plan, "digest": plan.digest, "num_joins": num_joins}
        for name, value in (values | {"num_pairs": num_pairs}).items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a Proof cannot be changed ({name}); call verify(plan) of another plan"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Proof cannot be changed ({name})")

    def __reduce__(self) -> tuple[Any, ...]:
        return verify, (self.plan,)

    def __str__(self) -> str:
        return (
            f"proved: plan {self.digest[:12]} writes every element of {self.plan.dst.spec} once "
            f"({len(self.plan.flows)} flows, {self.num_joins} joins, {self.num_pairs} pairs)"
        )


def verify(plan: Plan) -> Proof:
    """Prove a plan. Its arrays are read-only from here on: what is proved stays as it is.

    Raises:
        PlanError: the plan has faults; the message lists every one.
    """
    for step in {id(step): step for flow in plan.flows for step in flow.joins}.values():
        step.freeze()
    faults = list(dict.fromkeys(_faults(plan)))
    if faults:
        raise PlanError(
            f"plan {plan.src.spec} -> {plan.dst.spec} has {len(faults)} faults; "
            "make it again with plan_reshard:\n" + "\n".join(f"  {fault}" for fault in faults)
        )
    joins = {id(step): step for flow in plan.flows for step in flow.joins}
    return Proof(_SEAL, plan, len(joins), sum(len(step.lo) for step in joins.values()))


def _faults(plan: Plan) -> Iterator[str]:
    for side, layout, ranks in (
        ("source", plan.src, plan.src_ranks),
        ("destination", plan.dst, plan.dst_ranks),
    ):
        yield from _mesh_faults(side, layout, ranks)
        yield from _name_faults(side, layout)
        for tensor in layout.tensors:
            yield from _tensor_faults(side, layout, tensor)
    yield from _flow_faults(plan)
    seen: dict[tuple[int, Cut, Cut, str, tuple[int, int]], list[str]] = {}
    for flow in plan.flows:
        dims = zip(flow.joins, flow.src.cuts, flow.dst.cuts, flow.tensor_class.domain, strict=False)
        for dim, (step, src_cut, dst_cut, domain) in enumerate(dims):
            key = (id(step), src_cut, dst_cut, _named(flow.key, src_cut, dst_cut), domain)
            if key not in seen:
                seen[key] = list(dim_faults(step, src_cut, dst_cut, flow.key, domain))
            place = "layers" if dim == 0 else f"dim {dim - 1}"
            yield from (f"{flow.key}, {place}: {fault}" for fault in seen[key])


def _named(key: str, *cuts: Cut) -> str:
    return key if any(key in cut.keys for cut in cuts) else OWN


def _mesh_faults(side: str, layout: Layout, ranks: tuple[int, ...]) -> Iterator[str]:
    expected = 1
    for axis in reversed(layout.mesh):
        if axis.size < 1 or axis.stride != expected:
            yield (
                f"{side} mesh: axis {axis.name} has size {axis.size} and stride {axis.stride}; "
                f"its stride must be {expected}"
            )
        expected *= axis.size
    if len(ranks) != expected or len(set(ranks)) != len(ranks) or min(ranks, default=0) < 0:
        yield f"{side} ranks {list(ranks)} are not {expected} different ranks >= 0"


def _name_faults(side: str, layout: Layout) -> Iterator[str]:
    live = Counter(
        tensor.template.format(layer=layer)
        for tensor in layout.tensors
        for layer in {
            n for cut in tensor.cuts[:1] for s in _segments(cut) for n in range(s.lo, s.hi)
        }
    )
    for name, count in live.items():
        if count > 1:
            yield (
                f"{name}: {count} layers or tensors of the {side} share this name; the template of "
                "a tensor with several layers has {layer} in it"
            )


def _tensor_faults(side: str, layout: Layout, tensor: LocalTensor) -> Iterator[str]:
    used = Counter(axis for cut in tensor.cuts for axis in cut.axes)
    for axis, count in used.items():
        if axis not in layout.mesh:
            yield f"{side} {tensor.template}: axis {axis} is not in the mesh {layout.mesh}"
        if count > 1:
            yield f"{side} {tensor.template}: axis {axis.name} cuts {count} dims"
    for cut in tensor.cuts:
        num_parts = prod(axis.size for axis in cut.axes)
        if len(cut.strips) != num_parts:
            yield f"{side} {tensor.template}: {len(cut.strips)} strips for {num_parts} parts"
    naming = [cut for cut in tensor.cuts if any(s.key != OWN for s in _segments(cut))]
    if len(naming) > 1 or (len(tensor.keys) > 1 and len(naming) != 1):
        yield f"{side} {tensor.template}: {len(naming)} dims tell its classes apart"


def _segments(cut: Cut) -> Iterator[Any]:
    return (s for strip in cut.strips for s in strip if s.key is not None)


def _flow_faults(plan: Plan) -> Iterator[str]:
    wanted = Counter((key, tensor.template) for tensor in plan.dst.tensors for key in tensor.keys)
    planned = Counter((flow.key, flow.dst.template) for flow in plan.flows)
    for key, template in sorted({*wanted, *planned}):
        if planned[key, template] != 1 or wanted[key, template] != 1:
            yield (
                f"{key} in {template}: {planned[key, template]} flows and "
                f"{wanted[key, template]} declared at the destination; it must be one of each"
            )
    shown = {key for key, _ in wanted}
    for key in plan.dst.model.class_of:
        if key not in shown:
            yield f"{key}: no tensor of the destination shows it"
    for flow in plan.flows:
        yield from _ends_faults(plan, flow)


def _ends_faults(plan: Plan, flow: Flow) -> Iterator[str]:
    ends = (("source", plan.src, flow.src), ("destination", plan.dst, flow.dst))
    for side, layout, tensor in ends:
        if tensor not in layout.tensors or flow.key not in tensor.keys:
            yield f"{flow.key}: {tensor.template} of the {side} does not show it"
        if layout.model.class_of.get(flow.key) != flow.tensor_class:
            yield f"{flow.key}: the {side} model has another tensor of this name, or none"
        if len(tensor.cuts) != len(flow.joins):
            yield f"{flow.key}: {len(flow.joins)} joins for {len(tensor.cuts)} dims of the {side}"
    if len(flow.joins) != len(flow.tensor_class.domain):
        yield f"{flow.key}: {len(flow.joins)} joins for {len(flow.tensor_class.domain)} dims"
