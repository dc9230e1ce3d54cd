"""What all executors share: protocol, report, and the check before a byte moves. Floor 3.

Called by the executors `transport.p2p`, `transport.shm`, `transport.gather` and by
`shardloop.weight_sync`, which chooses between them.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from shardloop.errors import PlanError
from shardloop.parallel.agree import agree
from shardloop.reshard.plan import Plan
from shardloop.reshard.verify import Proof
from shardloop.transport.bind import check_bound
from shardloop.transport.buckets import Share, Tensors

BUCKET_BYTES = 4 * 2**20
"""Large beside what a message costs, small enough that a bucket is still in the processor's cache
when it is copied on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferReport:
    """What one rank moved."""

    bytes_sent: int
    """To other ranks, in the transfer dtype; local copies are not counted."""
    bytes_received: int
    local_bytes: int
    """Copied within this rank, where it is both source and destination."""
    messages: int
    """Buckets sent."""
    seconds: float
    peak_extra_bytes: int
    """Staging buffers: the only memory beyond the tensors themselves."""
    num_sent: int = 0
    """Elements sent to other ranks, where a transport can leave some out: in deltas."""
    num_left_out: int = 0
    """Elements not sent because the other rank had them."""


class Transport(Protocol):
    """One way to carry out a proved plan, prepared once and used for every update."""

    def move(self, src: Tensors | None, dst: Tensors | None) -> TransferReport:
        """Collective over the transport's group: write every destination tensor, in place.

        Args:
            src: this rank's source tensors by local name, any floating-point dtype and strides;
                None if it is no source.
            dst: this rank's destination tensors, contiguous; None if it is no destination. Both
                have passed `check_tensors`.
        Raises:
            WorkerDied, WorkerTimeout: naming pair and bucket. The destination is then half
                written, and the transport cannot be used again.
        """

    def close(self) -> None:
        """Give all memory and connections back. A second time it does nothing."""


def check_ready(
    proof: Proof,
    *,
    src: Tensors | None,
    dst: Tensors | None,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    same: str,
    timeout_s: float,
) -> None:
    """Collective over `group`: pass if the tensors of all ranks fit the plan, else raise on all.

    Raises:
        PlanError: listing this rank's faults, or naming ranks that have some; or `same` differs.
    """
    fault = None
    try:
        check_tensors(proof.plan, dist.get_rank(), src=src, dst=dst, dtype=dtype)
        check_members(proof.plan, group)
    except PlanError as error:
        fault = error
    same = f"plan {proof.digest[:12]}, dtype={dtype}, {same}"
    agree(group, fault=fault, same=same, what="the transfer", timeout_s=timeout_s)


def check_tensors(
    plan: Plan, rank: int, *, src: Tensors | None, dst: Tensors | None, dtype: torch.dtype
) -> None:
    """Check that global rank `rank` holds what its roles in the plan need.

    Raises:
        PlanError: tensors are given without a role or a role has none, or they do not fit.
    """
    for role, ranks, tensors in (("src", plan.src_ranks, src), ("dst", plan.dst_ranks, dst)):
        if (rank in ranks) != (tensors is not None):
            given = "None" if tensors is None else "tensors"
            raise PlanError(
                f"rank {rank} passed {role}={given}, but the {role} ranks of the plan are "
                f"{list(ranks)}; pass tensors on these and None on all others"
            )
    if src is not None:
        check_bound(plan.src, plan.src_ranks.index(rank), src, strides="any")
    if dst is not None:
        check_bound(plan.dst, plan.dst_ranks.index(rank), dst, dtype=dtype)


def check_members(plan: Plan, group: dist.ProcessGroup) -> None:
    """Raises PlanError if a rank of the plan is not in `group`."""
    members = dist.get_process_group_ranks(group)
    outside = sorted({*plan.src_ranks, *plan.dst_ranks} - {*members})
    if outside:
        raise PlanError(
            f"ranks {outside} of the plan are not in the group {members}; "
            "pass a group over all ranks of both sides"
        )


def copy_local(share: Share, src: Tensors | None, dst: Tensors | None) -> int:
    """Carry out the copies within this rank; the bytes that were written."""
    num_bytes = 0
    for transfer in share.local:
        assert src is not None and dst is not None, "a local copy needs both roles"
        target = transfer.dst.of(dst)
        target.copy_(transfer.src.of(src))
        num_bytes += target.nbytes
    return num_bytes
