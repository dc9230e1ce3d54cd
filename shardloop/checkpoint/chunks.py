"""One chunk of a tensor, read from the file of torch.distributed.checkpoint that has it. Floor 3.

Called by `checkpoint.plain` and `convert.dcp_files`. A chunk is an archive of its own, with the
checksums of its bytes, which torch itself does not look at.
"""

import io
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from shardloop.errors import CheckpointError

ELEMENTS = "/data/0"
"""Ends the name, in such an archive, of the storage of the one tensor in it."""


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
        tensor = torch.load(archive, map_location="cpu", weights_only=True)
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"there is a {type(tensor).__name__} where a tensor should be")
        _demand_saved(tensor, archive)
    return tensor


def _demand_saved(tensor: Tensor, archive: IO[bytes]) -> None:
    """As `demand_sound`, without reading the elements a second time."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    with zipfile.ZipFile(archive) as entries:
        for entry in entries.infolist():
            if not entry.filename.endswith(ELEMENTS):
                entries.read(entry)  # compares
            elif zlib.crc32(storage.numpy().data) != entry.CRC:
                raise _altered(entry.filename)


def demand_sound(archive: Path | IO[bytes]) -> None:
    """Reads all of what torch.save wrote: its bytes must have the checksums that are in it.

    Raises:
        CheckpointError: one does not. OSError, BadZipFile: it cannot be read.
    """
    with zipfile.ZipFile(archive) as entries:
        if (bad := entries.testzip()) is not None:
            raise _altered(bad)


def _altered(entry: str) -> CheckpointError:
    return CheckpointError(f"{entry} in it is not what was saved: its checksum differs")


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
