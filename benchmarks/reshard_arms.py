"""Ways to bring weights from a training layout into an engine's, on real ranks.

Called by `benchmarks.reshard_ranks` on every rank. An arm is made once and then called for every
update; all ranks make and call the arms in the same order.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from benchmarks.reshard_limits import (
    copy_as_they_lie,
    gloo,
    loopback,
    shared_copy,
    traffic_of,
)
from shardloop.layout import Layout, Piece, box_of
from shardloop.parallel.context import RankContext
from shardloop.reshard.verify import Proof
from shardloop.transport.base import BUCKET_BYTES, TransferReport, Transport
from shardloop.transport.buckets import make_share
from shardloop.transport.gather import Gather
from shardloop.transport.p2p import P2P
from shardloop.transport.relay import Relay
from shardloop.transport.shm import Shm

DTYPE = torch.bfloat16
State = Mapping[str, Tensor]
Work = Callable[[], TransferReport | None]
Maker = Callable[[], Work]


@dataclass(frozen=True, kw_only=True)
class Here:
    """This rank's part: its tensors on either side, None where it has no role."""

    context: RankContext
    proof: Proof
    src: dict[str, Tensor] | None
    dst: dict[str, Tensor] | None
    folder: Path
    """In memory; all ranks see it."""
    closing: ExitStack

    @property
    def dst_pieces(self) -> Iterator[Piece]:
        plan = self.proof.plan
        return plan.dst.pieces(plan.dst_ranks.index(self.context.rank))


def allocate(layout: Layout, place: int) -> dict[str, Tensor]:
    """Local tensors full of NaN, so that an element that is not written shows."""
    shapes = layout.local_shapes(place)
    return {name: torch.full(shape, torch.nan, dtype=DTYPE) for name, shape in shapes.items()}


def cut(layout: Layout, place: int, state: State) -> dict[str, Tensor]:
    tensors = allocate(layout, place)
    for piece in layout.pieces(place):
        piece.of(tensors).copy_(box_of(state[piece.name], piece.box))
    return tensors


def our_arms(here: Here) -> dict[str, Maker]:
    args = {"dtype": DTYPE, "group": dist.group.WORLD}

    def made(kind: Callable[..., Transport]) -> Work:
        transport = kind(here.proof, **args)
        here.closing.callback(transport.close)
        return lambda: transport.move(here.src, here.dst)

    return {
        "ours, shm": lambda: made(Shm),
        "ours, p2p": lambda: made(P2P),
        "ours, gather": lambda: made(Gather),
    }


def relay_arm(here: Here, relay: Relay) -> Work:
    rank = here.context.rank
    proof, hop = relay.proof_of(rank), relay.hop(rank)
    transport = P2P(proof, dtype=DTYPE, group=dist.group.WORLD, hop=hop)
    here.closing.callback(transport.close)
    return lambda: transport.move(here.src, here.dst)


def torch_arms(here: Here) -> dict[str, Maker]:
    """For a source that cuts every tensor along its first dim, and nothing else."""
    plan = here.proof.plan
    arms: dict[str, Maker] = {"dcp.save + dcp.load": lambda: _dcp(here)}
    if plan.src_ranks == plan.dst_ranks:
        arms["DTensor.redistribute"] = lambda: _redistribute(here)
    else:
        arms["full_tensor + broadcast"] = lambda: _full_tensor(here)
    return arms


def limit_arms(here: Here) -> dict[str, Maker]:
    plan, rank = here.proof.plan, here.context.rank
    traffic = traffic_of(plan, rank, DTYPE.itemsize)
    share = make_share(plan, rank, dtype=DTYPE, bucket_bytes=BUCKET_BYTES)
    return {
        "limit: shared memory": lambda: shared_copy(traffic, here.folder),
        "limit: as they lie": lambda: copy_as_they_lie(share, here.src, here.dst, here.folder),
        "limit: TCP loopback": lambda: loopback(traffic, here.closing),
        "limit: gloo": lambda: gloo(traffic),
    }


def _mesh(here: Here, role: str) -> DeviceMesh:
    return DeviceMesh.from_group(here.context.group(role), "cpu", mesh_dim_names=(role,))


def _sources(here: Here) -> dict[str, DTensor]:
    if here.src is None:
        return {}
    mesh, shapes = _mesh(here, "src"), here.proof.plan.src.model.tensor_shapes()
    return {
        name: _dtensor(tensor, mesh, Shard(0), shapes[name]) for name, tensor in here.src.items()
    }


def _dtensor(
    local: Tensor, mesh: DeviceMesh, placement: Placement, shape: tuple[int, ...]
) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
    )


def _placement(piece: Piece, shape: tuple[int, ...]) -> Placement:
    """How a piece of tensor parallelism lies in its tensor."""
    cut_dims = [dim for dim, run in enumerate(piece.box) if run != (0, shape[dim])]
    return Shard(cut_dims[0]) if cut_dims else Replicate()


def _full_tensor(here: Here) -> Work:
    """Gather each parameter on all ranks of the trainer, broadcast it from the first, cut it."""
    plan = here.proof.plan
    root = plan.src_ranks[0]
    group = dist.new_group([root, *plan.dst_ranks])
    sources, shapes = _sources(here), plan.src.model.tensor_shapes()
    pieces: dict[str, list[Piece]] = {}
    if here.dst is not None:
        for piece in here.dst_pieces:
            pieces.setdefault(piece.name, []).append(piece)

    def work() -> None:
        for name, shape in shapes.items():
            full = sources[name].full_tensor() if sources else torch.empty(shape, dtype=DTYPE)
            if here.dst is not None or here.context.rank == root:
                dist.broadcast(full, root, group=group)
            for piece in pieces.get(name, ()):
                assert here.dst is not None
                piece.of(here.dst).copy_(box_of(full, piece.box))

    return work


def _redistribute(here: Here) -> Work:
    """Each parameter from the trainer's cut into the engine's, then into its fused tensor."""
    sources, shapes = _sources(here), here.proof.plan.src.model.tensor_shapes()
    pieces = list(here.dst_pieces)

    def work() -> None:
        assert here.dst is not None
        for piece in pieces:
            placement = _placement(piece, shapes[piece.name])
            moved = sources[piece.name].redistribute(placements=[placement])
            piece.of(here.dst).copy_(moved.to_local())

    return work


def _dcp(here: Here) -> Work:
    """Through files in memory: the engine's DTensors are views of its fused tensors."""
    folder = here.folder / "dcp"
    sources, shapes = _sources(here), here.proof.plan.src.model.tensor_shapes()
    targets = {}
    if here.dst is not None:
        mesh = _mesh(here, "dst")
        for piece in here.dst_pieces:
            shape = shapes[piece.name]
            view = piece.of(here.dst)
            targets[piece.name] = _dtensor(view, mesh, _placement(piece, shape), shape)

    def work() -> None:
        if sources:
            writer = FileSystemWriter(folder, sync_files=False, overwrite=True)
            dcp.save(sources, storage_writer=writer, process_group=here.context.group("src"))
        dist.barrier()
        if targets:
            dcp.load(targets, checkpoint_id=folder, process_group=here.context.group("dst"))

    return work
