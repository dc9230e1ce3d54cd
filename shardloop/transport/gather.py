"""The naive transfer: gather every tensor on one rank, broadcast it, cut it. Floor 3.

Nobody should use it for real weights: each tensor crosses the wire once per rank, and every rank
holds it whole for a moment. It reads the two layouts and not the plan's transfers, so it is the
reference that tests and benchmarks compare `shardloop.transport.p2p` with.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.dtypes import torch_dtype
from shardloop.families.base import by_name
from shardloop.layout import Box, Piece, box_of
from shardloop.parallel.agree import named_error, wait, wire_device
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

    Arguments and errors as there; a lost rank is named with the tensor.
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
        plan, rank = proof.plan, dist.get_rank()
        self._first = _first_pieces(plan)
        self._needed: dict[str, list[Piece]] = {}
        if rank in plan.dst_ranks:
            for piece in plan.dst.pieces(plan.dst_ranks.index(rank)):
                self._needed.setdefault(piece.name, []).append(piece)

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
            to_root = self._gather(full, name, src or {})
            self._wait(partial(dist.broadcast, async_op=True), full, root, f"broadcast of {name}")
            sent += num_peers * full.nbytes if rank == root else to_root
            received += to_root if rank == root else full.nbytes
            peak = max(peak, full.nbytes)
            for piece in self._needed.get(name, ()):
                assert dst is not None, "a rank that needs pieces has tensors"
                _cut(full, piece, dst)
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

    def _gather(self, full: Tensor, name: str, src: Tensors) -> int:
        """Fill `full` on the first source rank; the bytes that this rank sent or received."""
        rank, root = dist.get_rank(), self._plan.src_ranks[0]
        num_bytes = 0
        for piece in self._first[name]:
            owner, what = self._plan.src_ranks[piece.rank], f"gather of {name}"
            if rank not in (owner, root):
                continue
            box = box_of(full, piece.box)
            part = torch.empty_like(box, memory_format=torch.contiguous_format)
            if rank == owner:
                part.copy_(piece.of(src))
            if owner != root:
                kind, peer = (dist.isend, root) if rank == owner else (dist.irecv, owner)
                self._wait(kind, part, peer, what)
                num_bytes += part.nbytes
            if rank == root:
                box.copy_(part)
        return num_bytes

    def _wait(
        self, kind: Callable[..., dist.Work | None], tensor: Tensor, peer: int, what: str
    ) -> None:
        """Carry out one operation with rank `peer`, which may be this one, and wait for it."""
        try:
            work = kind(tensor.view(torch.uint8), peer, group=self._group)
        except RuntimeError as error:
            raise named_error(error, what, self._timeout_s) from error
        assert work is not None, "this process is not a rank of the group"
        wait(work, what=f"{what}, rank {peer}", timeout_s=self._timeout_s)


def _cut(full: Tensor, piece: Piece, dst: Tensors) -> None:
    """Write one piece of a whole tensor."""
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
