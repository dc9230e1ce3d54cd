"""Stored tensors by rank and name, read box by box. Called by everything in `convert`. Floor 3.

A format is a `Reader`; `StoredTensors` makes one rank of it a mapping whose tensors stay in their
files until they are sliced, so `View.of` of a plan reads no more than its box.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

from torch import Tensor, dtype

from shardloop.layout.layout import Box, View

MOST_LISTED = 20
"""Faults that are told; of more, their number."""


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


class Stored(NamedTuple):
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: dtype
    files: tuple[Path, ...]
    """Where its elements are."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


class Reader(Protocol):
    """One format of checkpoints."""

    format: str
    """As `--from` and `--to` call it."""
    path: Path
    spec: str
    """The layout string of its ranks; `tp=1` where tensors are whole under their own names."""
    num_ranks: int
    notes: Mapping[str, str]
    """What else is known: steps, versions, what there is besides the weights."""

    def tensors(self, rank: int) -> Mapping[str, Stored]:
        """The weights that a rank holds, by local name."""

    def read(self, rank: int, name: str, box: Box) -> Tensor:
        """The elements of a box of a local tensor, on the CPU, not to be written into.

        Raises:
            CheckpointError: the file is damaged.
        """

    def chunks(self, rank: int, name: str) -> Iterator[tuple[Box, Path]]:
        """The boxes that a local tensor is stored in, and the file of each."""

    def everything(self) -> Iterator[tuple[int, str, Stored]]:
        """All tensors of the checkpoint, of the optimizer too where they have names; `read` takes
        these names as well."""


class UnchunkedReader(Reader):
    """A format that keeps each local tensor whole, in one file."""

    def chunks(self, rank: int, name: str) -> Iterator[tuple[Box, Path]]:
        stored = self.tensors(rank)[name]
        yield whole(stored.shape), stored.files[0]

    def everything(self) -> Iterator[tuple[int, str, Stored]]:
        for rank in range(self.num_ranks):
            for name, stored in self.tensors(rank).items():
                yield rank, name, stored


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A stored tensor that can be sliced."""

    reader: Reader
    rank: int
    name: str
    on_read: Callable[[int], None]

    def __getitem__(self, slices: Sequence[slice | int]) -> Tensor:
        box = tuple(map(_run, slices))
        part = self.reader.read(self.rank, self.name, box)
        self.on_read(part.nbytes)
        return part


class StoredTensors(Mapping[str, LazyTensor]):
    """What one rank holds, for `View.of`."""

    def __init__(self, reader: Reader, rank: int, on_read: Callable[[int], None]) -> None:
        """
        Args:
            on_read: called after each read with its bytes.
        """
        self._reader, self._rank, self._on_read = reader, rank, on_read

    def __getitem__(self, name: str) -> LazyTensor:
        return LazyTensor(self._reader, self._rank, name, self._on_read)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.tensors(self._rank))

    def __len__(self) -> int:
        return len(self._reader.tensors(self._rank))


def read_view(reader: Reader, rank: int, view: View) -> Tensor:
    """The elements of a view. Only its own bytes are read, where each local dim is one of them."""
    if view.inner and len(view.shape) == len(view.slices):
        pairs = zip(view.slices, view.inner, strict=True)
        box = tuple((_run(a)[0] + b.start, _run(a)[0] + b.stop) for a, b in pairs)
        return reader.read(rank, view.local_name, box)
    part: Tensor = view.of(StoredTensors(reader, rank, lambda num_bytes: None))
    return part


def _run(part: slice | int) -> tuple[int, int]:
    assert isinstance(part, slice), "checkpoints hold no stacked experts"
    return part.start, part.stop


def listed(faults: Sequence[str]) -> str:
    """Faults, a line each, under the text that goes before."""
    more = [f"and {len(faults) - MOST_LISTED} more"] if len(faults) > MOST_LISTED else []
    return "".join(f"\n  {fault}" for fault in [*faults[:MOST_LISTED], *more])
