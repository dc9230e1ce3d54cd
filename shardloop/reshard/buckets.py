"""Streams of elements cut into buckets, and the buffers they pass through. Floor 1.

    views of tensors ──Lane.buckets──▶ parts ──pack──▶ buffer ~~wire~~ buffer ──unpack──▶ parts

Called by `shardloop.reshard.p2p`. Both ends of a pair have the same stream, so they cut the same
buckets without talking to each other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardloop.reshard.flow import View


@dataclass(slots=True)
class Lane:
    """What one rank sends to one other, or receives from it."""

    limit: int
    """Elements per bucket."""
    views: list[Tensor] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(view.numel() for view in self.views)

    @property
    def num_buckets(self) -> int:
        return -(-self.size // self.limit)

    def buckets(self) -> Iterator[list[Tensor]]:
        """Lists of views of `limit` elements in all (the last: the rest), in stream order."""
        parts: list[Tensor] = []
        room = self.limit
        for view in self.views:
            start = 0
            while start < view.numel():
                stop = min(view.numel(), start + room)
                parts.extend(flat_range(view, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield parts
                    parts, room = [], self.limit
        if parts:
            yield parts


def make_lanes(
    records: Iterable[tuple[int, View]], tensors: Mapping[str, Tensor], *, limit: int
) -> dict[int, Lane]:
    """Group `(peer rank, view)` records into one lane per peer, keeping their order."""
    lanes: dict[int, Lane] = {}
    for peer, view in records:
        lanes.setdefault(peer, Lane(limit)).views.append(view.of(tensors))
    return lanes


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
    """Two buffers used in turn, as large as the largest bucket; each is made when first needed."""

    def __init__(self, lanes: Iterable[Lane], *, dtype: torch.dtype, device: torch.device) -> None:
        self._size = max((min(lane.limit, lane.size) for lane in lanes), default=0)
        self._dtype, self._device = dtype, device
        self._buffers: dict[int, Tensor] = {}

    def buffer(self, bucket: int, parts: Sequence[Tensor]) -> Tensor:
        """The memory that goes over the wire, one-dimensional.

        A bucket that is a single part already lying as the wire needs it is that part itself.
        """
        if len(parts) == 1 and self._fits_wire(parts[0]):
            return parts[0].view(-1)
        turn = bucket % 2
        if turn not in self._buffers:
            self._buffers[turn] = torch.empty(self._size, dtype=self._dtype, device=self._device)
        return self._buffers[turn][: sum(part.numel() for part in parts)]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _fits_wire(self, part: Tensor) -> bool:
        return part.dtype == self._dtype and part.device == self._device and part.is_contiguous()


def pack(parts: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy the parts into `buffer` one after another, converting the dtype."""
    for part, slot in _slots(parts, buffer):
        slot.copy_(part)


def unpack(parts: Sequence[Tensor], buffer: Tensor) -> None:
    """Copy `buffer` into the parts one after another."""
    for part, slot in _slots(parts, buffer):
        part.copy_(slot)


def _slots(parts: Sequence[Tensor], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each part with its place in the buffer; none where the part is the buffer."""
    start = 0
    for part in parts:
        slot = buffer[start : start + part.numel()].view(part.shape)
        start += part.numel()
        if slot.data_ptr() != part.data_ptr():
            yield part, slot
