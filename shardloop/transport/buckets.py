"""One rank's share of a plan, cut into buckets, and how a bucket is packed. Floor 3.

    transfers of a pair of ranks in one dtype ──▶ a stream ──▶ its buckets, in order
    views of tensors ──pack──▶ bucket's memory ~~wire~~ bucket's memory ──unpack──▶ views of tensors

Called by the executors. Both ends of a pair cut the same transfers into the same buckets without
talking to each other, since a cut depends on their sizes alone. A share is written out once per
plan and used for each update; it holds no tensors.

Streams are ordered by round: in a round every rank sends to one rank at most and receives from one
at most. Within it the dtypes follow one another, by name, and in each the buckets.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shardloop.dtypes import torch_dtype
from shardloop.layout.layout import View
from shardloop.reshard.flow import Transfer
from shardloop.reshard.plan import Plan

Tensors = Mapping[str, Tensor]


class Part(NamedTuple):
    """Elements lo .. hi-1 of a view, read row by row."""

    view: View
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What goes over the wire as one message."""

    src_rank: int
    dst_rank: int
    dtype: torch.dtype
    number: int
    """From 1, within its stream."""
    parts: tuple[Part, ...]
    num_bytes: int

    def of(self, tensors: Tensors) -> list[Tensor]:
        """Its elements in order, as views of `tensors`."""
        return [
            view for part in self.parts for view in flat_range(part.view.of(tensors), *part[1:])
        ]

    def __str__(self) -> str:
        size = f"{self.num_bytes} bytes of {self.dtype}"
        return f"rank {self.src_rank} -> rank {self.dst_rank}, bucket {self.number} ({size})"


class Step(NamedTuple):
    """What a rank sends and receives at the same time."""

    send: Bucket | None
    receive: Bucket | None


@dataclass(frozen=True)
class Share:
    """One rank's part of a plan."""

    local: tuple[Transfer, ...]
    """Copies from the rank to itself."""
    steps: tuple[Step, ...]

    @cached_property
    def sends(self) -> list[Bucket]:
        return [step.send for step in self.steps if step.send]

    @cached_property
    def receives(self) -> list[Bucket]:
        return [step.receive for step in self.steps if step.receive]


def make_share(plan: Plan, rank: int, *, dtype: torch.dtype, bucket_bytes: int) -> Share:
    """Write out what global `rank` does.

    Args:
        dtype: of what moves and declares none of its own.
        bucket_bytes: most of a bucket, but one element at least; equal on all ranks.
    """
    sends, receives = plan.sends(rank), plan.receives(rank)
    outgoing = _streams(plan, sends, rank, dtype, bucket_bytes)
    incoming = _streams(plan, receives, rank, dtype, bucket_bytes)
    steps = [
        Step(*pair)
        for key in sorted({*outgoing, *incoming})
        for pair in zip_longest(outgoing.get(key, ()), incoming.get(key, ()))
    ]
    return Share(tuple(t for t in sends if t.dst_rank == rank), tuple(steps))


def wire_dtype(transfer: Transfer, dtype: torch.dtype) -> torch.dtype:
    """What the transfer's elements move in: what their class declares, else `dtype`."""
    return dtype if transfer.dtype is None else torch_dtype(transfer.dtype)


def _streams(
    plan: Plan, transfers: Iterable[Transfer], rank: int, dtype: torch.dtype, bucket_bytes: int
) -> dict[tuple[int, str], list[Bucket]]:
    """Buckets by (round, name of dtype): rank d of the destination and s of the source meet in
    round d - s, modulo the larger number of ranks, so no two pairs of a round share an end."""
    num_rounds = max(len(plan.src_ranks), len(plan.dst_ranks))
    grouped: dict[tuple[int, str], list[Transfer]] = {}
    for transfer in transfers:
        if transfer.src_rank != transfer.dst_rank:
            src, dst = plan.src_index[transfer.src_rank], plan.dst_index[transfer.dst_rank]
            key = (dst - src) % num_rounds, str(wire_dtype(transfer, dtype))
            grouped.setdefault(key, []).append(transfer)
    return {
        key: list(_buckets(stream, rank, wire_dtype(stream[0], dtype), bucket_bytes))
        for key, stream in grouped.items()
    }


def _buckets(
    stream: Sequence[Transfer], rank: int, dtype: torch.dtype, bucket_bytes: int
) -> Iterator[Bucket]:
    first = stream[0]
    sends = first.src_rank == rank
    views = [(t.src if sends else t.dst, prod(hi - lo for lo, hi in t.box)) for t in stream]
    limit = max(1, bucket_bytes // dtype.itemsize)
    for number, parts in enumerate(cut_parts(views, limit=limit), start=1):
        num_bytes = sum(part.hi - part.lo for part in parts) * dtype.itemsize
        yield Bucket(first.src_rank, first.dst_rank, dtype, number, tuple(parts), num_bytes)


def cut_parts(views: Iterable[tuple[View, int]], *, limit: int) -> Iterator[list[Part]]:
    """Lists of parts of `limit` elements at most, which together are all views in order.

    A view that does not fit into what is left starts a new list, so a large one is alone in its
    lists; there it can be sent from, or received into, the tensor itself.

    Args:
        views: with the number of elements of each.
    """
    parts: list[Part] = []
    room = limit
    for view, size in views:
        if parts and size > room:
            yield parts
            parts, room = [], limit
        start = 0
        while size - start > room:
            yield [Part(view, start, start + room)]
            start += room
        if start < size:
            parts.append(Part(view, start, size))
            room -= size - start
    if parts:
        yield parts


def flat_range(view: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Elements start .. stop-1 of `view` in row-major order, as a few smaller views."""
    if start == 0 and stop == view.numel():
        yield view
        return
    if view.is_contiguous():
        yield view.view(-1)[start:stop]
        return
    row = view[0].numel()
    first, last = -(-start // row), stop // row  # rows first .. last-1 are taken whole
    if first > last:
        yield from flat_range(view[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from flat_range(view[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield view[first:last]
    if last * row < stop:
        yield from flat_range(view[last], 0, stop - last * row)


class Staging:
    """The two buffers of one direction, used in turn; made when first needed, and then kept."""

    def __init__(self, buckets: Iterable[Bucket], *, device: torch.device) -> None:
        self._size = max((bucket.num_bytes for bucket in buckets), default=0)
        self._device = device
        self._buffers: dict[int, Tensor] = {}

    def buffer(self, turn: int, bucket: Bucket, parts: Sequence[Tensor]) -> Tensor:
        """The memory that goes over the wire, bytes in one dim.

        A bucket that is a single part already lying as the wire needs it is that part itself.
        """
        if len(parts) == 1 and self._fits_wire(parts[0], bucket.dtype):
            return parts[0].view(-1).view(torch.uint8)
        if turn % 2 not in self._buffers:
            self._buffers[turn % 2] = torch.empty(
                self._size, dtype=torch.uint8, device=self._device
            )
        return self._buffers[turn % 2][: bucket.num_bytes]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def clear(self) -> None:
        self._buffers.clear()

    def _fits_wire(self, part: Tensor, dtype: torch.dtype) -> bool:
        return part.dtype == dtype and part.device == self._device and part.is_contiguous()


def pack(parts: Sequence[Tensor], buffer: Tensor, dtype: torch.dtype) -> None:
    """Copy the parts into the bytes of `buffer` one after another, converted to `dtype`."""
    for part, slot in _slots(parts, buffer.view(dtype)):
        slot.copy_(part)


def unpack(parts: Sequence[Tensor], buffer: Tensor, dtype: torch.dtype) -> None:
    """Copy `buffer`, whose bytes are elements of `dtype`, into the parts one after another."""
    for part, slot in _slots(parts, buffer.view(dtype)):
        part.copy_(slot)


def _slots(parts: Sequence[Tensor], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each part with its place in the buffer; none where the part is the buffer."""
    slots = buffer.split([part.numel() for part in parts])
    for part, slot in zip(parts, slots, strict=True):
        if slot.data_ptr() != part.data_ptr():
            yield part, slot.view(part.shape)
