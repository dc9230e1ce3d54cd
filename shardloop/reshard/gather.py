"""The naive transfer: gather every tensor on one rank, broadcast it, cut it. Floor 3.

Nobody should use it for real weights: each tensor crosses the wire once per rank, and every rank
holds it whole for a moment. It reads the two layouts and not the plan's transfers, so it is the
reference that tests and benchmarks compare `shardloop.reshard.p2p` with.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.layout import Piece, box_of
from shardloop.parallel.agree import named_error, wire_device
from shardloop.reshard.fingerprint import find_copies
from shardloop.reshard.p2p import Tensors, TransferReport, check_ready
from shardloop.reshard.plan import Plan
from shardloop.reshard.verify import Proof


@torch.no_grad()
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
    start = time.perf_counter()
    plan, rank, root = proof.plan, dist.get_rank(), proof.plan.src_ranks[0]
    check_ready(
        proof,
        src=src,
        dst=dst,
        dtype=dtype,
        group=group,
        same=f"plan {proof.digest[:12]}",
        timeout_s=timeout_s,
    )
    first = _first_pieces(plan)
    num_peers = dist.get_world_size(group) - 1
    sent = received = peak = 0
    for name, shape in plan.src.model.tensor_shapes().items():
        full = torch.empty(shape, dtype=dtype, device=wire_device(group))
        try:
            to_root = _gather(full, first[name], plan, src or {}, group)
            dist.broadcast(full, root, group=group)
        except RuntimeError as error:
            raise named_error(error, f"gather and broadcast of {name}", timeout_s) from error
        sent += num_peers * full.nbytes if rank == root else to_root
        received += to_root if rank == root else full.nbytes
        peak = max(peak, full.nbytes)
        if dst is not None:
            for piece in plan.dst.pieces(plan.dst_ranks.index(rank)):
                if piece.name == name:
                    box_of(dst[piece.local_name], piece.local_box).copy_(box_of(full, piece.box))
    return TransferReport(
        bytes_sent=sent,
        bytes_received=received,
        local_bytes=0,
        messages=0,
        seconds=time.perf_counter() - start,
        peak_extra_bytes=peak,
    )


def _first_pieces(plan: Plan) -> dict[str, list[Piece]]:
    """One holder of each element of each source tensor."""
    copies = find_copies(plan.src)
    first: dict[str, list[Piece]] = {name: [] for name in copies.names}
    for rank in range(plan.src.world_size):
        for piece in plan.src.pieces(rank):
            if copies.of(piece).ordinal == 0:
                first[piece.name].append(piece)
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
            part.copy_(box_of(src[piece.local_name], piece.local_box))
        if owner != root and rank == owner:
            dist.send(part, root, group=group)
        if owner != root and rank == root:
            dist.recv(part, owner, group=group)
        if rank == root:
            box_of(full, piece.box).copy_(part)
        num_bytes += part.nbytes if owner != root else 0
    return num_bytes
