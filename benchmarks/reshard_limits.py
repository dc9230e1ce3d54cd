"""What this machine allows: the bytes of a plan between the same processes, without a plan.

Called by `benchmarks.reshard_arms` on every rank. All limits move what the plan moves between each
pair of ranks, a bucket at a time, and copy in place what a rank already holds; but for one, from
and to flat memory as large as all that the rank sends or receives.

    shared memory   senders copy into two slots, receivers out of them; nobody waits for anybody
    as they lie     the same, from and to the elements' own places in the tensors: rows of a cut
                    along columns are read and written apart, which memory does more slowly
    TCP loopback    one socket for each pair, bytes as they come
    gloo            all buckets posted at once, then waited for
"""

import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.reshard.plan import Plan
from shardloop.transport.base import BUCKET_BYTES
from shardloop.transport.buckets import Bucket, Share, Tensors

RANK = struct.Struct("<q")


class Traffic(NamedTuple):
    """Bytes of one rank, by peer, in the order of the rounds of a transfer."""

    rank: int
    sends: Mapping[int, int]
    receives: Mapping[int, int]
    local: int


def traffic_of(plan: Plan, rank: int, itemsize: int) -> Traffic:
    sends: dict[int, int] = {}
    receives: dict[int, int] = {}
    local = 0
    for transfer in plan.sends(rank):
        size = transfer.num_elements * itemsize
        if transfer.dst_rank == rank:
            local += size
        else:
            sends[transfer.dst_rank] = sends.get(transfer.dst_rank, 0) + size
    for transfer in plan.receives(rank):
        if transfer.src_rank != rank:
            size = transfer.num_elements * itemsize
            receives[transfer.src_rank] = receives.get(transfer.src_rank, 0) + size
    rounds = max(len(plan.src_ranks), len(plan.dst_ranks))

    def turn(src: int, dst: int) -> int:
        return (plan.dst_index[dst] - plan.src_index[src]) % rounds

    return Traffic(
        rank,
        dict(sorted(sends.items(), key=lambda item: turn(rank, item[0]))),
        dict(sorted(receives.items(), key=lambda item: turn(item[0], rank))),
        local,
    )


def _flat(num_bytes: int) -> Tensor:
    return torch.ones(num_bytes, dtype=torch.uint8)


class Memory:
    """Flat memory of a rank, and its copies in place."""

    def __init__(self, traffic: Traffic) -> None:
        self.out = _flat(sum(traffic.sends.values()))
        self.into = _flat(sum(traffic.receives.values()))
        self._here, self._there = _flat(traffic.local), _flat(traffic.local)

    def copy_local(self) -> None:
        self._there.copy_(self._here)


def shared_copy(traffic: Traffic, folder: Path) -> Callable[[], None]:
    """Collective over all ranks: the slots of the senders are files in `folder`, in memory."""
    memory = Memory(traffic)

    own = _slots_of(traffic.rank, folder).fill_(1) if traffic.sends else None
    dist.barrier()
    copies: list[tuple[Tensor, Tensor]] = []
    for part, number in _parts(memory.out, traffic.sends.values()):
        assert own is not None, "a sender has slots"
        copies.append((_slot(own, number, part), part))
    into = memory.into
    for peer, num_bytes in traffic.receives.items():
        slots = _slots_of(peer, folder)
        copies += [(part, _slot(slots, n, part)) for part, n in _parts(into, [num_bytes])]
        into = into[num_bytes:]

    def work() -> None:
        memory.copy_local()
        for target, source in copies:
            target.copy_(source)

    return work


def copy_as_they_lie(
    share: Share, src: Tensors | None, dst: Tensors | None, folder: Path
) -> Callable[[], None]:
    """Collective over all ranks: as `shared_copy`, of the elements of `src`, into those of `dst`.

    Nobody waits, so that what is received has no meaning.
    """
    senders = {bucket.src_rank for bucket in (*share.sends, *share.receives)}
    slots = {rank: _slots_of(rank, folder).fill_(0) for rank in sorted(senders)}
    dist.barrier()
    copies = [(t.dst.of(dst or {}), t.src.of(src or {})) for t in share.local]
    for step in share.steps:
        if step.send:
            copies += [(slot, part) for slot, part in _halves(slots, step.send, src)]
        if step.receive:
            copies += [(part, slot) for slot, part in _halves(slots, step.receive, dst)]

    def work() -> None:
        for target, source in copies:
            target.copy_(source)

    return work


def _halves(
    slots: Mapping[int, Tensor], bucket: Bucket, tensors: Tensors | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The places of a bucket's parts in a slot, and in the tensors."""
    parts = bucket.of(tensors or {})
    flat = slots[bucket.src_rank]
    start = bucket.number % 2 * BUCKET_BYTES
    slot = flat[start : start + bucket.num_bytes].view(bucket.dtype)
    for place, part in zip(slot.split([part.numel() for part in parts]), parts, strict=True):
        yield place.view(part.shape), part


def _slots_of(rank: int, folder: Path) -> Tensor:
    path, size = str(folder / f"slots-{rank}"), 2 * BUCKET_BYTES
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _parts(flat: Tensor, sizes: Iterable[int]) -> Iterator[tuple[Tensor, int]]:
    """Consecutive buckets of memory that is divided among peers, each with its number."""
    for num_bytes in sizes:
        for number, part in enumerate(flat[:num_bytes].split(BUCKET_BYTES)):
            yield part, number
        flat = flat[num_bytes:]


def _slot(slots: Tensor, number: int, part: Tensor) -> Tensor:
    start = number % 2 * BUCKET_BYTES
    return slots[start : start + part.nbytes]


def loopback(traffic: Traffic, closing: ExitStack) -> Callable[[], None]:
    """Collective over all ranks: opens a socket for each pair."""
    memory = Memory(traffic)
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
    listener.settimeout(60)
    ports: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(ports, listener.getsockname()[1])
    outgoing, incoming = {}, {}
    for peer in traffic.sends:
        line = closing.enter_context(socket.create_connection(("127.0.0.1", ports[peer]), 60))
        line.sendall(RANK.pack(traffic.rank))
        outgoing[peer] = line
    for _ in traffic.receives:
        line = closing.enter_context(listener.accept()[0])
        line.settimeout(60)
        incoming[RANK.unpack(line.recv(RANK.size, socket.MSG_WAITALL))[0]] = line

    def send() -> None:
        view = memoryview(memory.out.numpy())
        for peer, num_bytes in traffic.sends.items():
            outgoing[peer].sendall(view[:num_bytes])
            view = view[num_bytes:]

    def receive() -> None:
        view = memoryview(memory.into.numpy())
        for peer, num_bytes in traffic.receives.items():
            part, view = view[:num_bytes], view[num_bytes:]
            while part:
                part = part[incoming[peer].recv_into(part) :]

    def work() -> None:
        memory.copy_local()
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        receive()
        sender.join()

    return work


def gloo(traffic: Traffic) -> Callable[[], None]:
    memory = Memory(traffic)

    def posted(
        post: Callable[..., dist.Work | None], flat: Tensor, peers: Mapping[int, int]
    ) -> Iterator[dist.Work | None]:
        for peer, num_bytes in peers.items():
            for part, _ in _parts(flat, [num_bytes]):
                yield post(part, peer)
            flat = flat[num_bytes:]

    def work() -> None:
        memory.copy_local()
        works = [
            *posted(dist.irecv, memory.into, traffic.receives),
            *posted(dist.isend, memory.out, traffic.sends),
        ]
        for one in works:
            assert one is not None, "this process is a rank of the group"
            one.wait()

    return work
