"""The naive transfer: gather every tensor on one rank, broadcast it, cut it. Floor 3.

Nobody should use it for real weights: each tensor crosses the wire once per rank, and every rank
holds it whole for a moment. It reads the two layouts and not the plan's transfers, so it is the
reference that tests and benchmarks compare `shardloop.transport.p2p` with.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.dtypes import torch_dtype
from shardloop.families.base import by_name
from shardloop.layout import Box, Piece, box_of
from shardloop.parallel.agree import named_error, wire_device
from shardloop.reshard.plan import Plan
from shardloop.reshard.verify import Proof
from shardloop.transport.base import TransferReport, check_ready
from shardloop.transport.buckets import Tensors


def execute_gather(
    proof: Proof,
    *,
    src: Tensors | None,
    dst: Tensors | None,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    timeout_s: float = 60.0,
) -> TransferReport:
    """Collective over `group`: the same result as `execute_p2p`, by way of whole tensors.

    Arguments as there; single waits are bounded by the group's own timeout.

    Raises:
        PlanError: on all ranks, as in `execute_p2p`.
        WorkerDied, WorkerTimeout: a rank went away; names the tensor.
    """
    same = "transport=gather"
    check_ready(proof, src=src, dst=dst, dtype=dtype, group=group, same=same, timeout_s=timeout_s)
    return Gather(proof, dtype=dtype, group=group, timeout_s=timeout_s).move(src, dst)


class Gather:
    """A proved plan's two layouts, for transfers by way of whole tensors: a `Transport`."""

    def __init__(
        self, proof: Proof, *, dtype: torch.dtype, group: dist.ProcessGroup, timeout_s: float = 60.0
    ) -> None:
        self._plan, self._dtype = proof.plan, dtype
        self._group, self._timeout_s = group, timeout_s
        self._first = _first_pieces(proof.plan)

    @torch.no_grad()
    def move(self, src: Tensors | None, dst: Tensors | None) -> TransferReport:
        """See `Transport.move`."""
        start = time.perf_counter()
        plan, group, rank = self._plan, self._group, dist.get_rank()
        root = plan.src_ranks[0]
        num_peers = dist.get_world_size(group) - 1
        sent = received = peak = 0
        for name, tensor_class in by_name(plan.src.model.classes):
            wire = self._dtype if tensor_class.dtype is None else torch_dtype(tensor_class.dtype)
            full = torch.empty(tensor_class.shape, dtype=wire, device=wire_device(group))
            try:
                to_root = _gather(full, self._first[name], plan, src or {}, group)
                dist.broadcast(full.view(torch.uint8), root, group=group)
            except RuntimeError as error:
                what = f"gather and broadcast of {name}"
                raise named_error(error, what, self._timeout_s) from error
            sent += num_peers * full.nbytes if rank == root else to_root
            received += to_root if rank == root else full.nbytes
            peak = max(peak, full.nbytes)
            _cut(full, name, plan, rank, dst)
        return TransferReport(
            bytes_sent=sent,
            bytes_received=received,
            local_bytes=0,
            messages=0,
            seconds=time.perf_counter() - start,
            peak_extra_bytes=peak,
        )

    def close(self) -> None:
        """It keeps no memory."""


def _cut(full: Tensor, name: str, plan: Plan, rank: int, dst: Tensors | None) -> None:
    """Write what `rank` needs of a whole tensor."""
    if dst is not None:
        for piece in plan.dst.pieces(plan.dst_ranks.index(rank)):
            if piece.name == name:
                piece.of(dst).copy_(box_of(full, piece.box))


def _first_pieces(plan: Plan) -> dict[str, list[Piece]]:
    """One holder of each box of each source tensor."""
    seen: set[tuple[str, Box]] = set()
    first: dict[str, list[Piece]] = {}
    for rank in range(plan.src.world_size):
        for piece in plan.src.pieces(rank):
            if (piece.name, piece.box) not in seen:
                seen.add((piece.name, piece.box))
                first.setdefault(piece.name, []).append(piece)
    return first


def _gather(
    full: Tensor, pieces: list[Piece], plan: Plan, src: Tensors, group: dist.ProcessGroup
) -> int:
    """Fill `full` on the first source rank; the bytes this rank sent to it or received there."""
    rank, root = dist.get_rank(), plan.src_ranks[0]
    num_bytes = 0
    for piece in pieces:
        owner = plan.src_ranks[piece.rank]
        if rank not in (owner, root):
            continue
        part = torch.empty_like(box_of(full, piece.box), memory_format=torch.contiguous_format)
        if rank == owner:
            part.copy_(piece.of(src))
        if owner != root and rank == owner:
            dist.send(part.view(torch.uint8), root, group=group)
        if owner != root and rank == root:
            dist.recv(part.view(torch.uint8), owner, group=group)
        if rank == root:
            box_of(full, piece.box).copy_(part)
        num_bytes += part.nbytes if owner != root else 0
    return num_bytes
