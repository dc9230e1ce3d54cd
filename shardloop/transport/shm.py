"""Carries out a proved plan through memory that ranks of one host share. Floor 3.

Called by `shardloop.weight_sync`. Each sender has a segment of two slots, used in turn:

    sender      wait for the ack of n-2 ── pack n into slot n % 2 ── say "n" ─┐
    receiver                            ┌── copy out of slot n % 2 ◀──────────┘
                                        └── ack n ──▶ sender

so a bucket is overwritten only after its reader has said that it has it. On GPUs the slots are GPU
memory opened through CUDA IPC; numbers and acks go the same way.

No deadlock: all ranks take their steps in the order (round, dtype, bucket) of `transport.buckets`,
and what a sender waits for is the ack of a bucket that comes earlier in it.

A rank that fails closes its lines, and so does one that is killed; its peers see that at once, fail
with its name and close theirs. Segments have no names, so nothing is left behind.
"""

import time
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.errors import ShardloopError, WorkerDied
from shardloop.parallel.agree import agree, named_error, wire_device
from shardloop.reshard.verify import Proof
from shardloop.transport.base import BUCKET_BYTES, TransferReport, check_ready, copy_local
from shardloop.transport.buckets import Bucket, Tensors, make_share, pack, unpack
from shardloop.transport.channel import Channel, Listener
from shardloop.transport.segment import Handle, Segment, make_segment, open_segment, settle

ALIGNED = 8
"""Bytes: a slot begins where any dtype may."""
Card = tuple[str, Handle | None]
"""Where a rank listens, and how its GPU segment is opened."""


def execute_shm(
    proof: Proof,
    *,
    src: Tensors | None,
    dst: Tensors | None,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    bucket_bytes: int = BUCKET_BYTES,
    timeout_s: float = 60.0,
) -> TransferReport:
    """Collective over `group`, whose ranks are all on one host: as `execute_p2p`, for one transfer.

    For repeated transfers make an `Shm` once. Raises what `execute_p2p` raises.
    """
    same = f"bucket_bytes={bucket_bytes}"
    check_ready(proof, src=src, dst=dst, dtype=dtype, group=group, same=same, timeout_s=timeout_s)
    shm = Shm(proof, dtype=dtype, group=group, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    try:
        return shm.move(src, dst)
    finally:
        shm.close()


class Peer(NamedTuple):
    """A rank that this one receives from."""

    channel: Channel
    segment: Segment


class Shm:
    """A proved plan made ready for shared memory: a `Transport`."""

    def __init__(
        self,
        proof: Proof,
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 60.0,
        device: torch.device | None = None,
    ) -> None:
        """Collective over `group`: every pair that will share memory opens a line.

        Args:
            device: where the slots lie, the same kind on all ranks; by default where the group's
                messages would lie. Give the GPU where a gloo group joins ranks that share one.
        Raises:
            WorkerDied, WorkerTimeout, PlanError: on all ranks: two ranks are not on one host, or a
                rank did not come.
        """
        share = make_share(proof.plan, dist.get_rank(), dtype=dtype, bucket_bytes=bucket_bytes)
        self._share, self._timeout_s = share, timeout_s
        self._own: Segment | None = None
        if share.sends:
            slot_bytes = max(bucket.num_bytes for bucket in share.sends)
            slot_bytes += -slot_bytes % ALIGNED
            self._own = make_segment(2 * slot_bytes, device=device or wire_device(group))
        self._receivers: dict[int, Channel] = {}
        self._senders: dict[int, Peer] = {}
        self._closed = False
        fault: ShardloopError | None = None
        listener = Listener(backlog=dist.get_world_size(group), timeout_s=timeout_s)
        what = "the set-up of shared memory"
        try:
            cards = self._exchange_cards(listener, group, what)
            try:
                self._connect(listener, cards)
            except ShardloopError as error:
                fault = error
            agree(group, fault=fault, same=what, what=what, timeout_s=timeout_s)
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()
        if self._own is not None:
            self._own.handed_over()

    def _exchange_cards(
        self, listener: Listener, group: dist.ProcessGroup, what: str
    ) -> dict[int, Card]:
        """Collective over `group`: the card of each rank."""
        mine: Card = listener.address, self._own.handle if self._own else None
        cards = [mine] * dist.get_world_size(group)
        try:
            dist.all_gather_object(cards, mine, group=group)
        except RuntimeError as error:
            raise named_error(error, what, self._timeout_s) from error
        return dict(zip(dist.get_process_group_ranks(group), cards, strict=True))

    def _connect(self, listener: Listener, cards: dict[int, Card]) -> None:
        """Open a line to each receiver, then take one from each sender."""
        rank = dist.get_rank()
        for peer in dict.fromkeys(bucket.dst_rank for bucket in self._share.sends):
            channel = Channel.connect(cards[peer][0], timeout_s=self._timeout_s)
            self._receivers[peer] = channel
            assert self._own is not None, "a sender has a segment"
            what = f"rank {rank} -> rank {peer}, the first word"
            channel.put(rank, what=what, descriptor=self._own.descriptor)
        for _ in {bucket.src_rank for bucket in self._share.receives}:
            channel = listener.accept()
            peer, descriptor = channel.get_with_file(
                what=f"rank {rank}, the first word of a sender"
            )
            self._senders[peer] = Peer(channel, open_segment(descriptor, cards[peer][1]))

    @torch.no_grad()
    def move(self, src: Tensors | None, dst: Tensors | None) -> TransferReport:
        """See `Transport.move`; when it returns, the readers have acknowledged all buckets."""
        if self._closed:
            raise WorkerDied("this transport has failed or was closed; start a new group")
        start = time.perf_counter()
        try:
            local_bytes = copy_local(self._share, src, dst)
            unread: list[tuple[int, Bucket]] = []
            num_sent = 0
            for step in self._share.steps:
                if step.send:
                    while len(unread) == 2:
                        self._await_ack(*unread.pop(0))
                    self._send(num_sent, step.send, src or {})
                    unread.append((num_sent, step.send))
                    num_sent += 1
                if step.receive:
                    self._receive(step.receive, dst or {})
            for number, bucket in unread:
                self._await_ack(number, bucket)
        except BaseException:
            self.close()
            raise
        return TransferReport(
            bytes_sent=sum(bucket.num_bytes for bucket in self._share.sends),
            bytes_received=sum(bucket.num_bytes for bucket in self._share.receives),
            local_bytes=local_bytes,
            messages=num_sent,
            seconds=time.perf_counter() - start,
            peak_extra_bytes=0 if self._own is None else self._own.num_bytes,
        )

    def close(self) -> None:
        """Close all lines and give the memory back."""
        self._closed = True
        for channel in self._receivers.values():
            channel.close()
        for peer in self._senders.values():
            peer.channel.close()
            peer.segment.close()
        if self._own is not None:
            self._own.close()
        self._receivers, self._senders, self._own = {}, {}, None

    def _send(self, number: int, bucket: Bucket, src: Tensors) -> None:
        assert self._own is not None, "a sender has a segment"
        slot = _slot(self._own, number, bucket.num_bytes)
        pack(bucket.of(src), slot, bucket.dtype)
        settle(slot)
        self._receivers[bucket.dst_rank].put(number, what=bucket)

    def _await_ack(self, number: int, bucket: Bucket) -> None:
        answer = self._receivers[bucket.dst_rank].get(what=bucket)
        assert answer == number, f"{bucket}: message {answer} was acknowledged, not {number}"

    def _receive(self, bucket: Bucket, dst: Tensors) -> None:
        channel, segment = self._senders[bucket.src_rank]
        number = channel.get(what=bucket)
        slot = _slot(segment, number, bucket.num_bytes)
        unpack(bucket.of(dst), slot, bucket.dtype)
        settle(slot)
        channel.put(number, what=bucket)


def _slot(segment: Segment, number: int, num_bytes: int) -> Tensor:
    assert segment.memory is not None, "the segment is open"
    start = number % 2 * (segment.num_bytes // 2)
    return segment.memory[start : start + num_bytes]
