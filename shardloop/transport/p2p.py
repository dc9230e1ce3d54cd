"""Carries out a proved plan with point-to-point messages. Floor 3.

Called by `shardloop.weight_sync`. A rank works through the steps of its share (see
`transport.buckets`); one step is on the wire while the next is packed and the last unpacked.

    step n:   pack n ── post send n, receive n ── wait for n-1 ── unpack n-1
                                                       └─ in a relay: pass n-1 on, then unpack

with two buffers in each direction. In a relay (`transport.relay`) a rank receives from its equal in
the replica before it and passes each bucket on, as it came, to its equal in the replica after it.

No deadlock: all ranks take their steps in the order (round, dtype, bucket), and a rank waits for a
message only after it has posted it. Of all unfinished messages take the least in this order, and of
the copies of one bucket that nearest to the source: it is posted at both ends and can finish.
A rank that owns nothing has no steps and waits for nothing.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.parallel.agree import named_error, wait, wire_device
from shardloop.reshard.verify import Proof
from shardloop.transport.base import BUCKET_BYTES, TransferReport, check_ready, copy_local
from shardloop.transport.buckets import Bucket, Staging, Step, Tensors, make_share, pack, unpack
from shardloop.transport.relay import Hop

DRAIN = (Step(None, None), Step(None, None))
"""Nothing new: the last bucket comes in, and then is passed on."""


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
    of all ranks fit the plan. For repeated transfers make a `P2P` once.

    Args:
        src: this rank's source tensors by local name, any floating-point dtype and strides; None if
            it is no source.
        dst: this rank's destination tensors by local name, contiguous and of `dtype` (or what the
            model declares for a tensor); None if it is no destination.
        dtype: what is sent, but for tensors whose dtype the model declares; sources are converted
            while they are packed.
        bucket_bytes: most of a message, equal on all ranks; two are staged in each direction.
        timeout_s: longest wait for one message.
    Raises:
        PlanError: on all ranks: the tensors of a rank do not fit, or settings differ between ranks.
        WorkerDied, WorkerTimeout: naming pair and bucket. The destination is then half written.
    """
    same = f"bucket_bytes={bucket_bytes}"
    check_ready(proof, src=src, dst=dst, dtype=dtype, group=group, same=same, timeout_s=timeout_s)
    p2p = P2P(proof, dtype=dtype, group=group, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    return p2p.move(src, dst)


class P2P:
    """A proved plan made ready for messages: a `Transport`. What it stages it keeps."""

    def __init__(
        self,
        proof: Proof,
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 60.0,
        hop: Hop | None = None,
    ) -> None:
        """Talks to nobody; the arguments are those of `execute_p2p`.

        Args:
            hop: this rank's place in a relay, if there is one.
        """
        rank = dist.get_rank()
        self._share = make_share(proof.plan, rank, dtype=dtype, bucket_bytes=bucket_bytes)
        self._hop = hop or Hop(rank)
        self._group, self._timeout_s = group, timeout_s
        device = wire_device(group)
        self._outgoing = Staging(self._share.sends, device=device)
        self._incoming = Staging(self._share.receives, device=device)

    @torch.no_grad()
    def move(self, src: Tensors | None, dst: Tensors | None) -> TransferReport:
        """See `Transport.move`."""
        start = time.perf_counter()
        local_bytes = 0
        pending, passing = Posted(), Posted()
        for turn, step in enumerate((*self._share.steps, *DRAIN)):
            passing.finish(self._timeout_s)  # its buffer is the one that `turn` receives into
            posted = self._post_step(turn, step, src or {}, dst or {})
            if turn == 0:
                local_bytes = copy_local(self._share, src, dst)  # while messages are on their way
            pending.finish(self._timeout_s)
            passing = self._pass_on(pending)
            pending.unpack()
            pending = posted
        return self._report(local_bytes, time.perf_counter() - start)

    def close(self) -> None:
        self._outgoing.clear()
        self._incoming.clear()

    def _report(self, local_bytes: int, seconds: float) -> TransferReport:
        share = self._share
        sent = share.sends if self._hop.after is None else share.receives
        return TransferReport(
            bytes_sent=sum(bucket.num_bytes for bucket in sent),
            bytes_received=sum(bucket.num_bytes for bucket in share.receives),
            local_bytes=local_bytes,
            messages=len(sent),
            seconds=seconds,
            peak_extra_bytes=self._outgoing.num_bytes + self._incoming.num_bytes,
        )

    def _post_step(self, turn: int, step: Step, src: Tensors, dst: Tensors) -> "Posted":
        posted = Posted()
        ops = []
        if step.send:
            parts = step.send.of(src)
            buffer = self._outgoing.buffer(turn, step.send, parts)
            pack(parts, buffer, step.send.dtype)
            ops.append(self._op(dist.isend, buffer, step.send.dst_rank))
            posted.labels.append(str(step.send))
        if step.receive:
            posted.bucket, posted.parts = step.receive, step.receive.of(dst)
            posted.buffer = self._incoming.buffer(turn, step.receive, posted.parts)
            peer = step.receive.src_rank if self._hop.before is None else self._hop.before
            ops.append(self._op(dist.irecv, posted.buffer, peer))
            posted.labels.append(f"{step.receive} from rank {peer}")
        if ops:
            self._post(ops, posted)
        return posted

    def _pass_on(self, received: "Posted") -> "Posted":
        """Post what has come in to the next replica, if there is one."""
        posted = Posted()
        if self._hop.after is not None and received.buffer is not None:
            posted.labels.append(f"{received.bucket}, passed on to rank {self._hop.after}")
            self._post([self._op(dist.isend, received.buffer, self._hop.after)], posted)
        return posted

    def _op(self, kind: Callable[..., dist.Work | None], buffer: Tensor, peer: int) -> dist.P2POp:
        place = dist.get_group_rank(self._group, peer)
        return dist.P2POp(kind, buffer, group=self._group, group_peer=place)

    def _post(self, ops: list[dist.P2POp], posted: "Posted") -> None:
        try:
            posted.works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise named_error(error, " and ".join(posted.labels), self._timeout_s) from error
        if len(posted.works) != len(posted.labels):  # the library made one operation of the batch
            posted.labels = [" and ".join(posted.labels)] * len(posted.works)


@dataclass(slots=True)
class Posted:
    """Messages on their way: at most one sent and one received."""

    works: list[dist.Work] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    bucket: Bucket | None = None
    """What is received."""
    parts: Sequence[Tensor] = ()
    buffer: Tensor | None = None

    def finish(self, timeout_s: float) -> None:
        for work, label in zip(self.works, self.labels, strict=True):
            wait(work, what=label, timeout_s=timeout_s)

    def unpack(self) -> None:
        if self.bucket is not None and self.buffer is not None:
            unpack(self.parts, self.buffer, self.bucket.dtype)
