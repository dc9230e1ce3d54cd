"""Carries out a proved plan with deltas: only what changed since the last update. Floor 3.

A `Transport` with the buckets, steps and order of `transport.p2p`.

    receiver                                            sender
    digest of each bucket it holds  ── claims ──▶       compare with what it was sent last
                                    ◀── header ──       encode the bucket, sparse or dense
    check, then write               ◀── payload ──      (the next bucket is encoded meanwhile)
    any bucket refused?             ── agree ──         FingerprintError on all ranks, or done

Nobody asks for a version: a receiver claims what it holds, and a claim that differs from what was
sent last is answered with the whole bucket (see `delta.source`). So an update after a lost one, to
a new engine or to one that slept is right and merely longer.

It buys bytes with processor time: both sides read all weights once more. Between hosts that pays;
where the wire is nearly as fast as memory, `transport.p2p` is sooner done.

No deadlock: all ranks take the steps in one order and in each post the header before the payload;
a rank waits for a message only after it has posted it. The least message in this order that is
unfinished is posted at both ends and can finish.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.delta.codec import (
    HEADER_BYTES,
    HEADER_LENGTH,
    Delta,
    apply,
    from_wire,
    payload_bytes,
)
from shardloop.delta.digest import digest
from shardloop.delta.source import DeltaSource
from shardloop.errors import FingerprintError
from shardloop.parallel.agree import agree, wire_device
from shardloop.reshard.verify import Proof
from shardloop.transport.base import BUCKET_BYTES, TransferReport, copy_local
from shardloop.transport.buckets import Bucket, Staging, Step, Tensors, make_share, pack, unpack
from shardloop.transport.mail import Mail, Message, Posted

CLAIM_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaReport(TransferReport):
    """What one rank moved. Bytes are those of claims, headers and payloads."""

    num_dense: int
    """Buckets sent whole."""
    kept_bytes: int
    """Copy of all that this rank sends, kept between updates; part of `peak_extra_bytes`."""


class DeltaTransport:
    """A proved plan made ready for deltas. Between updates it keeps what it sent."""

    def __init__(
        self,
        proof: Proof,
        *,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        """Talks to nobody; the arguments are those of `execute_p2p`."""
        plan, rank = proof.plan, dist.get_rank()
        self._share = make_share(plan, rank, dtype=dtype, bucket_bytes=bucket_bytes)
        self._sources = [DeltaSource() for _ in self._share.steps]
        self._group, self._mail = group, Mail(group, timeout_s)
        self._device = wire_device(group)
        self._outgoing = Staging(self._share.sends, device=self._device)
        self._incoming = Staging(self._share.receives, device=self._device)

    @torch.no_grad()
    def move(self, src: Tensors | None, dst: Tensors | None) -> DeltaReport:
        """See `Transport.move`; also raises, on all ranks and after all messages:

        FingerprintError: a delta arrived damaged at some rank. Nothing of that bucket was written,
            other buckets are new. The next `move` mends it.
        """
        start = time.perf_counter()
        local_bytes = copy_local(self._share, src, dst)
        holds = [
            digest(self._held(turn, step.receive, dst or {})) if step.receive else 0
            for turn, step in enumerate(self._share.steps)
        ]
        claims = self._exchange_claims(holds)
        tally, faults, pending = Tally(), list[str](), None
        for turn, step in enumerate(self._share.steps):
            posted = self._post_step(turn, step, src or {}, claims, tally)
            faults += self._finish(pending, dst or {}, holds)
            pending = posted
        faults += self._finish(pending, dst or {}, holds)
        fault = FingerprintError("\n".join(faults)) if faults else None
        what = "the use of the deltas"
        agree(self._group, fault=fault, same=what, what=what, timeout_s=self._mail.timeout_s)
        return self._report(tally, local_bytes, time.perf_counter() - start)

    def close(self) -> None:
        self._outgoing.clear()
        self._incoming.clear()
        self._sources = [DeltaSource() for _ in self._share.steps]

    def _held(self, turn: int, bucket: Bucket, dst: Tensors) -> Tensor:
        """What the tensors hold of a bucket, in one dim; itself where it lies in one piece."""
        parts = bucket.of(dst)
        buffer = self._incoming.buffer(turn, bucket, parts)
        pack(parts, buffer, bucket.dtype)
        return buffer.view(bucket.dtype)

    def _exchange_claims(self, holds: Sequence[int]) -> list[int]:
        """By turn, what the receivers of our buckets hold; our senders are told the same of us."""
        told: dict[int, list[int]] = {}
        asked: dict[int, list[int]] = {}
        for turn, step in enumerate(self._share.steps):
            if step.receive:
                told.setdefault(step.receive.src_rank, []).append(holds[turn])
            if step.send:
                asked.setdefault(step.send.dst_rank, []).append(turn)
        answers = {peer: self._empty(len(turns), torch.int64) for peer, turns in asked.items()}
        messages = [
            Message(dist.isend, torch.tensor(values).to(self._device), peer, "claims to")
            for peer, values in told.items()
        ]
        messages += [
            Message(dist.irecv, answer, peer, "claims from") for peer, answer in answers.items()
        ]
        self._mail.post(messages).wait()
        claims = [0] * len(self._share.steps)
        for peer, turns in asked.items():
            for turn, claim in zip(turns, answers[peer].tolist(), strict=True):
                claims[turn] = claim
        return claims

    def _post_step(
        self, turn: int, step: Step, src: Tensors, claims: Sequence[int], tally: "Tally"
    ) -> "Pending":
        """Exchange the headers of a step and post its payloads."""
        headers, payloads = [], []
        if step.send:
            parts = step.send.of(src)
            buffer = self._outgoing.buffer(turn, step.send, parts)
            pack(parts, buffer, step.send.dtype)
            new = buffer.view(step.send.dtype)
            delta = self._sources[turn].update(new, holds=claims[turn])
            tally.count_sent(delta)
            to = step.send.dst_rank
            header = delta.header().to(self._device)
            headers.append(Message(dist.isend, header, to, f"header of {step.send}"))
            payloads.append(Message(dist.isend, delta.payload(), to, f"delta of {step.send}"))
        arriving = self._empty(HEADER_LENGTH, torch.int64)
        if step.receive:
            peer, label = step.receive.src_rank, str(step.receive)
            headers.append(Message(dist.irecv, arriving, peer, f"header of {label}"))
        self._mail.post(headers).wait()
        payload = self._empty(0, torch.uint8)
        if step.receive:
            num_bytes = payload_bytes(arriving, itemsize=step.receive.dtype.itemsize)
            payload = self._empty(num_bytes, torch.uint8)
            payloads.append(Message(dist.irecv, payload, peer, f"delta of {label}"))
            tally.count_received(num_bytes)
        posted = self._mail.post([message for message in payloads if len(message.buffer)])
        return Pending(posted, turn, step.receive, arriving, payload)

    def _finish(self, pending: "Pending | None", dst: Tensors, holds: Sequence[int]) -> list[str]:
        """Wait for the payloads of a step and write what came in; what was wrong with it."""
        if pending is None:
            return []
        pending.posted.wait()
        if pending.bucket is None:
            return []
        bucket, turn = pending.bucket, pending.turn
        try:
            delta = from_wire(pending.header, pending.payload, dtype=bucket.dtype)
            held = self._held(turn, bucket, dst)
            apply(delta, held, holds=holds[turn])
        except FingerprintError as error:
            return [f"{bucket}: {error}"]
        unpack(bucket.of(dst), held.view(torch.uint8), bucket.dtype)
        return []

    def _empty(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)

    def _report(self, tally: "Tally", local_bytes: int, seconds: float) -> DeltaReport:
        num_sends, num_receives = len(self._share.sends), len(self._share.receives)
        kept_bytes = sum(source.num_bytes for source in self._sources)
        staged = self._outgoing.num_bytes + self._incoming.num_bytes
        return DeltaReport(
            bytes_sent=tally.bytes_sent + CLAIM_BYTES * num_receives,
            bytes_received=tally.bytes_received + CLAIM_BYTES * num_sends,
            local_bytes=local_bytes,
            messages=num_sends,
            seconds=seconds,
            peak_extra_bytes=kept_bytes + staged + 2 * (tally.most_sent + tally.most_received),
            num_sent=tally.num_sent,
            num_left_out=tally.num_left_out,
            num_dense=tally.num_dense,
            kept_bytes=kept_bytes,
        )


@dataclass(slots=True)
class Tally:
    """Counts of one update."""

    bytes_sent: int = 0
    bytes_received: int = 0
    most_sent: int = 0
    most_received: int = 0
    num_sent: int = 0
    num_left_out: int = 0
    num_dense: int = 0

    def count_sent(self, delta: Delta) -> None:
        self.bytes_sent += delta.num_bytes
        self.most_sent = max(self.most_sent, delta.num_bytes)
        self.num_sent += len(delta.values)
        self.num_left_out += delta.num_elements - len(delta.values)
        self.num_dense += delta.symbols is None

    def count_received(self, num_bytes: int) -> None:
        self.bytes_received += HEADER_BYTES + num_bytes
        self.most_received = max(self.most_received, HEADER_BYTES + num_bytes)


class Pending(NamedTuple):
    """A step whose payloads are on their way."""

    posted: Posted
    turn: int
    bucket: Bucket | None
    """What is received."""
    header: Tensor
    payload: Tensor
