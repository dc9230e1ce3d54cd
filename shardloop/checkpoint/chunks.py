"""One chunk of a tensor, read from the file of torch.distributed.checkpoint that has it. Floor 3.

Called by `checkpoint.plain` and `convert.dcp_files`. A chunk is an archive of its own, with the
checksums of its bytes, which torch itself does not look at.
"""

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from shardloop.errors import CheckpointError


class Place(Protocol):
    """Where a chunk is; torch's own `_StorageInfo` is one."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None
    """None or empty: the bytes are as they were."""


def load_chunk(folder: Path, place: Place) -> Tensor:
    """The tensor that is saved there, on the CPU.

    Raises:
        CheckpointError: its bytes are not those that were saved, were transformed, or are no
            tensor. Any Exception: they are no archive of torch.
    """
    if descriptors := getattr(place, "transform_descriptors", None):  # older torch has none
        raise CheckpointError(
            f"its bytes were transformed by {', '.join(descriptors)}; "
            "save the checkpoint without extensions"
        )
    file = folder / place.relative_path
    with io.BufferedReader(_Window(file, place.offset, place.length)) as archive:
        demand_sound(archive)
        archive.seek(0)
        tensor = torch.load(archive, map_location="cpu", weights_only=True)
    if not isinstance(tensor, Tensor):
        raise CheckpointError(f"there is a {type(tensor).__name__} where a tensor should be")
    return tensor


def demand_sound(archive: Path | IO[bytes]) -> None:
    """Reads all of what torch.save wrote: its bytes must have the checksums that are in it.

    Raises:
        CheckpointError: one does not. OSError, BadZipFile: it cannot be read.
    """
    with zipfile.ZipFile(archive) as entries:
        if (bad := entries.testzip()) is not None:
            raise CheckpointError(f"{bad} in it is not what was saved: its checksum differs")


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self._file = path.open("rb")
        self._start, self._length, self._at = start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view[: max(0, self._length - self._at)])
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
