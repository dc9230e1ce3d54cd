"""Carries out a proved plan with point-to-point messages. Floor 3.

Called by `shardloop.weight_sync`. The transfers of a pair of ranks form one stream, cut into
buckets. Rounds order the pairs: in round r every rank sends to the rank r places after it and
receives from the rank r places before it.

    bucket b of a round:   pack b ── post send b, receive b ── wait for b-1 ── unpack b-1

with two buffers in each direction, so that packing overlaps with the wire.

No deadlock: a rank posts its messages in the order (round, bucket) and waits for one only after it
has posted it, so the smallest unfinished (round, bucket) is posted at both ends and can finish, for
any two numbers of ranks. A rank that owns nothing passes through all rounds without a wait.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.errors import PlanError
from shardloop.parallel.agree import agree, named_error, wait, wire_device
from shardloop.reshard.bind import check_bound
from shardloop.reshard.buckets import Lane, Staging, make_lanes, pack, unpack
from shardloop.reshard.plan import Plan
from shardloop.reshard.verify import Proof

Tensors = Mapping[str, Tensor]
BUCKET_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferReport:
    """What one rank moved."""

    bytes_sent: int
    """Over the wire, in the transfer dtype; local copies are not counted."""
    bytes_received: int
    local_bytes: int
    """Copied within this rank, where it is both source and destination."""
    messages: int
    """Buckets sent."""
    seconds: float
    peak_extra_bytes: int
    """Staging buffers: the only memory beyond the tensors themselves."""


@torch.no_grad()
def execute_p2p(
    proof: Proof,
    *,
    src: Tensors | None,
    dst: Tensors | None,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    bucket_bytes: int = BUCKET_BYTES,
    timeout_s: float = 60.0,
) -> TransferReport:
    """Collective over `group`: write every destination tensor from the source tensors, in place.

    Every rank of `group` calls it, also those that own nothing. Nothing is sent unless the tensors
    of all ranks fit the plan.

    Args:
        src: this rank's source tensors by local name, any floating-point dtype and strides; None if
            it is no source.
        dst: this rank's destination tensors by local name, contiguous and of `dtype`; None if it is
            no destination.
        dtype: what is sent; sources are converted to it while they are packed.
        bucket_bytes: size of a message, equal on all ranks; two are staged in each direction.
        timeout_s: longest wait for one message.
    Raises:
        PlanError: on all ranks: the tensors of a rank do not fit, or settings differ between ranks.
        WorkerDied, WorkerTimeout: naming pair and bucket. The destination is then half written.
    """
    start = time.perf_counter()
    same = f"plan {proof.digest[:12]}, bucket_bytes={bucket_bytes}"
    check_ready(proof, src=src, dst=dst, dtype=dtype, group=group, same=same, timeout_s=timeout_s)
    rank, plan = dist.get_rank(), proof.plan
    local_bytes = _copy_local(plan, rank, src, dst, dtype)
    limit = max(1, bucket_bytes // dtype.itemsize)
    sent = ((t.dst_rank, t.src) for t in plan.sends(rank) if t.dst_rank != rank)
    received = ((t.src_rank, t.dst) for t in plan.receives(rank) if t.src_rank != rank)
    outgoing = make_lanes(sent, src or {}, limit=limit)
    incoming = make_lanes(received, dst or {}, limit=limit)
    wire = Wire(
        send_staging=Staging(outgoing.values(), dtype=dtype, device=wire_device(group)),
        receive_staging=Staging(incoming.values(), dtype=dtype, device=wire_device(group)),
        group=group,
        timeout_s=timeout_s,
    )
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(rank)
    for shift in range(1, len(ranks)):
        after, before = ranks[(place + shift) % len(ranks)], ranks[(place - shift) % len(ranks)]
        wire.run_round(
            after, outgoing.get(after, Lane(limit)), before, incoming.get(before, Lane(limit))
        )
    return TransferReport(
        bytes_sent=sum(lane.size for lane in outgoing.values()) * dtype.itemsize,
        bytes_received=sum(lane.size for lane in incoming.values()) * dtype.itemsize,
        local_bytes=local_bytes,
        messages=sum(lane.num_buckets for lane in outgoing.values()),
        seconds=time.perf_counter() - start,
        peak_extra_bytes=wire.send_staging.num_bytes + wire.receive_staging.num_bytes,
    )


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
        _check_members(proof.plan, group)
    except PlanError as error:
        fault = error
    same = f"dtype={dtype}, {same}"
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


def _check_members(plan: Plan, group: dist.ProcessGroup) -> None:
    members = dist.get_process_group_ranks(group)
    outside = sorted({*plan.src_ranks, *plan.dst_ranks} - {*members})
    if outside:
        raise PlanError(
            f"ranks {outside} of the plan are not in the group {members}; "
            "pass a group over all ranks of both sides"
        )


def _copy_local(
    plan: Plan, rank: int, src: Tensors | None, dst: Tensors | None, dtype: torch.dtype
) -> int:
    num_elements = 0
    for transfer in plan.sends(rank):
        if transfer.dst_rank == rank:
            assert src is not None and dst is not None, "a local copy needs both roles"
            target = transfer.dst.of(dst)
            target.copy_(transfer.src.of(src))
            num_elements += target.numel()
    return num_elements * dtype.itemsize


@dataclass(slots=True)
class Posted:
    """Messages on their way: at most one sent and one received."""

    works: list[tuple[dist.Work, str]] = field(default_factory=list)
    parts: Sequence[Tensor] = ()
    buffer: Tensor | None = None

    def finish(self, timeout_s: float) -> None:
        for work, label in self.works:
            wait(work, what=label, timeout_s=timeout_s)
        if self.buffer is not None:
            unpack(self.parts, self.buffer)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """Sends and receives one pair of lanes at a time."""

    send_staging: Staging
    receive_staging: Staging
    group: dist.ProcessGroup
    timeout_s: float

    def run_round(self, after: int, outgoing: Lane, before: int, incoming: Lane) -> None:
        """All buckets to rank `after` and from rank `before`; returns when both lanes are done."""
        sends, receives = outgoing.buckets(), incoming.buckets()
        rank = dist.get_rank()
        pending = Posted()
        for bucket in range(max(outgoing.num_buckets, incoming.num_buckets)):
            ops, labels, posted = [], [], Posted()
            if bucket < outgoing.num_buckets:
                parts = next(sends)
                buffer = self.send_staging.buffer(bucket, parts)
                pack(parts, buffer)
                ops.append(self._op(dist.isend, buffer, after))
                labels.append(f"rank {rank} -> rank {after}, {_nth(bucket, outgoing, buffer)}")
            if bucket < incoming.num_buckets:
                posted.parts = next(receives)
                posted.buffer = self.receive_staging.buffer(bucket, posted.parts)
                ops.append(self._op(dist.irecv, posted.buffer, before))
                label = _nth(bucket, incoming, posted.buffer)
                labels.append(f"rank {before} -> rank {rank}, {label}")
            posted.works = self._post(ops, labels)
            pending.finish(self.timeout_s)
            pending = posted
        pending.finish(self.timeout_s)

    def _op(self, kind: Callable[..., dist.Work | None], buffer: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, buffer, group=self.group, group_peer=self._place(peer))

    def _place(self, rank: int) -> int:
        return dist.get_group_rank(self.group, rank)

    def _post(self, ops: list[dist.P2POp], labels: list[str]) -> list[tuple[dist.Work, str]]:
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise named_error(error, " and ".join(labels), self.timeout_s) from error
        if len(works) != len(labels):  # the library made one operation of the batch
            labels = [" and ".join(labels)] * len(works)
        return list(zip(works, labels, strict=True))


def _nth(bucket: int, lane: Lane, buffer: Tensor) -> str:
    return f"bucket {bucket + 1} of {lane.num_buckets} ({buffer.nbytes} bytes)"
