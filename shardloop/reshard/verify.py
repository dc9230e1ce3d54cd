"""Proof that a plan writes every destination element exactly once, from the right element. Floor 1.

Called by whoever wants to execute a plan: executors take a `Proof`, and only `verify` makes one. It
shares no code with the planner: it reads the layouts' strips anew, and the plan's numbers. It never
enumerates ranks x tensors, and checks each join once however many classes and layers share it:

    mesh      strides are 1, n1, n1 n2, ...: (parts, free coordinates) <-> rank is one to one
    names     no rank gives two tensors one name, and no local element belongs to two classes
    flows     all that the destination shows comes in one flow, from tensors that show it too
    tables    the rows planned with are the rows declared: nobody's place (`loc`) is invented
    whole     all ranks of a side together leave out no element
    cover     the pairs of each destination row make up its box, each element exactly once
    held      each pair lies in its atom, and each holder's row contains the atom
    turns     the consumers of a cell lie side by side, so that both ends count them alike
    living    with lost ranks: whatever the destination needs, a rank that is left holds

The transfers into a product of rows (one of each block of dims) are the products of the pairs of
these rows; sums of products distribute, so covers per block multiply to the cover of the whole. The
checks are exact, but for covers of blocks of several dims (see `cover`): there a wrong plan passes
with a chance below 2**-41.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardloop.errors import PlanError
from shardloop.families.base import TensorClass
from shardloop.layout.layout import LocalTensor
from shardloop.layout.tables import Axis
from shardloop.reshard.flow import Flow
from shardloop.reshard.plan import Plan
from shardloop.reshard.proof.declared import dims_text
from shardloop.reshard.proof.layouts import layout_faults
from shardloop.reshard.proof.rows import content_faults

_SEAL = object()


class Proof:
    """A plan that has been verified. Only `verify` makes one; unpickling verifies again."""

    __slots__ = ("digest", "num_boxes", "num_classes", "plan")

    plan: Plan
    digest: str
    """Content hash of the plan that was proved."""
    num_classes: int
    """Kinds of tensors: those of all layers and experts are one."""
    num_boxes: int
    """Common boxes of the two sides that were checked, each once for all that share it."""

    def __init__(self, seal: object, plan: Plan) -> None:
        if seal is not _SEAL:
            raise TypeError("a Proof cannot be made by hand; call verify(plan)")
        joins = {id(step): step for flow in plan.flows for step in flow.joins}
        values = {
            "plan": plan,
            "digest": plan.digest,
            "num_classes": len({flow.key for flow in plan.flows}),
            "num_boxes": sum(len(step.lo) for step in joins.values()),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __init_subclass__(cls) -> None:
        raise TypeError("a Proof has no subclasses; call verify(plan)")

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
            f"({self.num_classes} kinds of tensors, {self.num_boxes} boxes checked)"
        )


def verify(plan: Plan) -> Proof:
    """Prove a plan. The proof has a plan of its own: its arrays are read-only, and nothing that was
    derived from the given one is kept.

    Raises:
        PlanError: the plan has faults; the message lists them all, but for the number that is given
            in place of many of one kind.
    """
    plan = _sealed(plan)
    faults = _layout_faults(plan) or list(_flow_faults(plan)) or list(content_faults(plan))
    if faults:
        raise PlanError(
            f"plan {plan.src.spec} -> {plan.dst.spec} has {len(faults)} faults; "
            "make it again with plan_reshard:\n" + "\n".join(f"  {fault}" for fault in faults)
        )
    return Proof(_SEAL, plan)


def _sealed(plan: Plan) -> Plan:
    steps = {id(step): step for flow in plan.flows for step in flow.joins}
    sealed = {number: step.sealed() for number, step in steps.items()}
    flows = (
        replace(flow, joins=tuple(sealed[id(step)] for step in flow.joins)) for flow in plan.flows
    )
    return replace(plan, flows=tuple(flows))


def _layout_faults(plan: Plan) -> list[str]:
    sides = (("source", plan.src, plan.src_ranks), ("destination", plan.dst, plan.dst_ranks))
    faults = [
        f"{side} {fault}" for side, layout, ranks in sides for fault in layout_faults(layout, ranks)
    ]
    lost = set(plan.lost)
    if unknown := sorted(lost - set(plan.src_ranks)):
        faults.append(f"lost ranks {unknown} are none of the source ranks {list(plan.src_ranks)}")
    if kept := sorted(lost & set(plan.dst_ranks)):
        faults.append(f"lost ranks {kept} are in the destination; give it other ranks")
    if list(plan.lost) != sorted(lost):
        faults.append(f"lost ranks {list(plan.lost)} are not in order, each once")
    return list(dict.fromkeys(faults))


def _flow_faults(plan: Plan) -> Iterator[str]:
    """Is there one flow for all that is shown, and do its parts belong together?"""
    wanted = Counter((key, tensor) for tensor in plan.dst.tensors for key in tensor.keys)
    planned = Counter((flow.key, flow.dst) for flow in plan.flows)
    for key, tensor in {**wanted, **planned}:
        if planned[key, tensor] != 1 or wanted[key, tensor] != 1:
            yield (
                f"{key} in {tensor.template}: {planned[key, tensor]} flows and "
                f"{wanted[key, tensor]} declared at the destination; it must be one of each"
            )
    for side, layout in (("source", plan.src), ("destination", plan.dst)):
        shown = {key for tensor in layout.tensors for key in tensor.keys}
        for key in layout.model.class_of:
            if key not in shown:
                yield f"{key}: no tensor of the {side} shows it"
    for flow in plan.flows:
        yield from (f"{flow.key}: {fault}" for fault in _ends_faults(plan, flow))


def _ends_faults(plan: Plan, flow: Flow) -> Iterator[str]:
    ends = (("source", plan.src, flow.src), ("destination", plan.dst, (flow.dst,)))
    for side, layout, tensors in ends:
        for tensor in tensors:
            if tensor not in layout.tensors or flow.key not in tensor.keys:
                yield f"{tensor.template} of the {side} does not show it"
        there = layout.model.class_of.get(flow.key)
        if there != flow.tensor_class:
            yield (
                f"in the {side} model it is {_class_text(there)}, "
                f"in the plan {_class_text(flow.tensor_class)}"
            )
    dims = [dim for block in flow.blocks for dim in block]
    if dims != list(range(len(flow.tensor_class.domain))) or len(flow.joins) != len(flow.blocks):
        yield f"{len(flow.joins)} joins for blocks {flow.blocks} of its dims"
    for tensor in (*flow.src, flow.dst):
        for cut in tensor.cuts:
            if not any(set(cut.dims) <= set(block) for block in flow.blocks):
                yield f"{tensor.template} cuts {dims_text(cut.dims)} together, the plan does not"
    copies = [tensor.template for tensor in flow.src]
    if len({_spread(flow, tensor) for tensor in flow.src}) != 1:
        yield f"its copies {copies} are not spread over the ranks alike"
    if sum(bool(step.src.source.any()) for step in flow.joins) > 1:
        yield f"its copies {copies} are told apart in more than one block of dims"


def _class_text(c: TensorClass | None) -> str:
    return "missing" if c is None else f"{c.template} {c.domain} of dtype {c.dtype or 'the model'}"


def _spread(flow: Flow, tensor: LocalTensor) -> tuple[Any, ...]:
    """The axes that cut each block, and the free ones."""
    cut = (
        _axes([axis for cut in tensor.cuts if set(cut.dims) <= set(block) for axis in cut.axes])
        for block in flow.blocks
    )
    return (*cut, _axes(tensor.free_axes))


def _axes(axes: Sequence[Axis]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((axis.stride, axis.size) for axis in axes if axis.size > 1))
