"""Carry out a plan in one process, for simulated ranks: tests, notebooks, offline conversion.

Works on numpy arrays and torch tensors alike, since both assign into views. Floor 1.
"""

from collections.abc import Mapping
from typing import Any

from shardloop.errors import PlanError
from shardloop.layout.fit import shape_faults
from shardloop.layout.layout import Layout
from shardloop.reshard.verify import Proof


def execute_inprocess(
    proof: Proof,
    src: Mapping[int, Mapping[str, Any]],
    dst: Mapping[int, Mapping[str, Any]],
) -> None:
    """Write every destination tensor in place. Values are cast to the destination's dtype.

    Args:
        src: global rank -> local tensor name -> array, for every source rank but the lost ones.
        dst: the same for every destination rank; padding in it is left as it is. The tensors of a
            rank that is in both must not share memory with its source tensors.
    Raises:
        TypeError: `proof` is not a Proof: verify the plan first.
        PlanError: ranks or tensors are missing, unknown, or of another shape (all are listed).
    """
    if not isinstance(proof, Proof):
        raise TypeError(
            f"execute_inprocess takes a Proof, got {type(proof).__name__}; verify(plan)"
        )
    plan = proof.plan
    faults = _misfits("source", plan.src, plan.src_index, src)
    faults += _misfits("destination", plan.dst, plan.dst_index, dst)
    if faults:
        raise PlanError(
            f"the tensors do not fit the plan {plan.src.spec} -> {plan.dst.spec}:\n"
            + "\n".join(f"  {fault}" for fault in faults)
        )
    for rank in plan.dst_ranks:
        for transfer in plan.receives(rank):
            transfer.dst.of(dst[rank])[...] = transfer.src.of(src[transfer.src_rank])


def _misfits(
    side: str,
    layout: Layout,
    index: Mapping[int, int],
    tensors: Mapping[int, Mapping[str, Any]],
) -> list[str]:
    faults = [
        f"{side} rank {rank} is not in the layout, or is lost"
        for rank in tensors
        if rank not in index
    ]
    for rank, layout_rank in index.items():
        shapes = layout.local_shapes(layout_rank)
        faults += [
            f"{side} rank {rank}: {fault}" for fault in shape_faults(shapes, tensors.get(rank, {}))
        ]
    return faults
