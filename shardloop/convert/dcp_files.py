"""Folders of torch.distributed.checkpoint, of ours and others: chunks of whole tensors. Floor 3.

Called by `convert.formats` and `convert.targets`. No process group is needed: a box is put together
from the chunks it touches, one at a time, whatever the ranks that wrote them.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_saver import save

from shardloop.checkpoint.chunks import Place, load_chunk
from shardloop.checkpoint.notes import TRAINER_FILE, read_notes
from shardloop.checkpoint.plain import METADATA_FILE, load_metadata
from shardloop.convert.damage import as_disk_error, damaged, demand_file
from shardloop.convert.store import Stored
from shardloop.errors import CheckpointError
from shardloop.hf.headers import EMBEDDING
from shardloop.hf.shards import TensorSpec
from shardloop.layout.layout import Box, box_of

PREFIX = "model."
"""Before the Hugging Face name of each weight of the policy, in our checkpoints."""
FOREIGN = "embedding.word_embeddings.weight"
"""In Megatron's own use of the format, which names and stacks tensors in another way."""


class DCPReader:
    format = "dcp"
    spec = "tp=1"
    num_ranks = 1

    def __init__(self, path: Path) -> None:
        """
        Raises:
            CheckpointError: the folder is damaged.
        """
        self.path = path
        metadata = _metadata(path)
        self._places = metadata.storage_data
        self._all: dict[str, TensorStorageMetadata] = {
            key: entry
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._prefix = _weights_prefix(path, self._all)
        self._loaded: tuple[MetadataIndex, Tensor] | None = None
        others = Counter(
            key.split(".")[0] for key in metadata.state_dict_metadata if not self._is_weight(key)
        )
        notes = {"ranks that saved it": str(self._num_savers())}
        if others:
            notes["also there"] = ", ".join(f"{n} of {name}" for name, n in others.items())
        if (path / TRAINER_FILE).is_file():
            notes["version"] = str(_version(path))
        self.notes: Mapping[str, str] = notes

    def _is_weight(self, key: str) -> bool:
        return key.startswith(self._prefix or "") and key in self._all

    def _num_savers(self) -> int:
        files = {str(place.relative_path) for place in self._places.values()}
        return len({file.rsplit("_", 1)[0] for file in files})

    def tensors(self, rank: int) -> dict[str, Stored]:
        start = len(self._prefix or "")
        return {
            key[start:]: self._stored(key, entry)
            for key, entry in self._all.items()
            if self._is_weight(key)
        }

    def _stored(self, key: str, entry: TensorStorageMetadata) -> Stored:
        places = (self._places.get(MetadataIndex(key, chunk.offsets)) for chunk in entry.chunks)
        files = dict.fromkeys(self.path / place.relative_path for place in places if place)
        return Stored(tuple(entry.size), entry.properties.dtype, tuple(files))

    def everything(self) -> Iterator[tuple[int, str, Stored]]:
        for key, entry in self._all.items():
            yield 0, key, self._stored(key, entry)

    def chunks(self, rank: int, name: str) -> Iterator[tuple[Box, Path]]:
        key = self._key(name)
        for chunk in self._all[key].chunks:
            if chunk.sizes.numel():
                place = self._places[MetadataIndex(key, chunk.offsets)]
                yield _box(chunk), self.path / place.relative_path

    def _key(self, name: str) -> str:
        """Of a weight by its Hugging Face name; anything else is a key already."""
        key = f"{self._prefix or ''}{name}"
        return key if key in self._all else name

    def read(self, rank: int, name: str, box: Box) -> Tensor:
        key = self._key(name)
        entry = self._all[key]
        made: Tensor | None = None
        for chunk in entry.chunks:
            ours = _box(chunk)
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(ours, box, strict=True))
            if any(lo >= hi for lo, hi in common):
                continue
            part = box_of(self._load(key, chunk, entry.properties.dtype), _within(common, ours))
            if common == tuple(box):
                return part
            if made is None:
                made = torch.empty([hi - lo for lo, hi in box], dtype=entry.properties.dtype)
            box_of(made, _within(common, box)).copy_(part)
        if made is None:
            return torch.empty([hi - lo for lo, hi in box], dtype=entry.properties.dtype)
        return made

    def _load(self, key: str, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Tensor:
        index = MetadataIndex(key, chunk.offsets)
        if self._loaded is None or self._loaded[0] != index:
            self._loaded = None  # before the next is read: one chunk is in memory
            self._loaded = index, self._load_from(self._places[index], chunk, dtype)
        return self._loaded[1]

    def _load_from(self, place: Place, chunk: ChunkStorageMetadata, dtype: torch.dtype) -> Tensor:
        file = self.path / place.relative_path
        try:
            tensor = load_chunk(self.path, place)
        except Exception as error:  # a damaged pickle or archive can raise anything
            raise damaged(file, error) from error
        if (tensor.shape, tensor.dtype) != (chunk.sizes, dtype):
            raise CheckpointError(f"{file}: a chunk is not the tensor that the metadata says")
        return tensor


def write_dcp(folder: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor]) -> None:
    """Write whole tensors, one at a time, under `model.` + their names; the metadata comes last.

    Raises:
        OSError: the folder cannot be written. Whatever `read` raises.
    """
    state = {
        PREFIX + name: torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        for name, spec in specs.items()
    }
    writer = FileSystemWriter(folder, sync_files=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant so
            save(state, storage_writer=writer, planner=_Streaming(read), no_dist=True)
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise as_disk_error(cause) from error


class _Streaming(DefaultSavePlanner):
    """Asks for each tensor when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn.removeprefix(PREFIX))


def _metadata(path: Path) -> Metadata:
    demand_file(path / METADATA_FILE)
    try:
        return load_metadata(path)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path}: not all there, or not what it should be; {error}"
        ) from error
    except Exception as error:  # a damaged pickle can raise anything, or hold anything
        raise damaged(path / METADATA_FILE, error) from error


def _weights_prefix(path: Path, keys: Mapping[str, object]) -> str | None:
    """What stands before the Hugging Face names of the weights; None if there are no such names."""
    ends = [key.removesuffix(EMBEDDING) for key in keys if key.endswith(EMBEDDING)]
    found = [end for end in ends if not end.startswith(("optim", "reference."))]
    if FOREIGN in keys:
        raise CheckpointError(
            f"{path}: Megatron's distributed checkpoint, which stacks the layers of a tensor; "
            "convert it to one file per rank (--ckpt-format torch) first"
        )
    if len(found) > 1 and PREFIX not in found:
        raise CheckpointError(
            f"{path}: holds several models, under {', '.join(map(repr, sorted(found)))}; save one"
        )
    return PREFIX if PREFIX in found else next(iter(found), None)


def _box(chunk: ChunkStorageMetadata) -> Box:
    return tuple((lo, lo + n) for lo, n in zip(chunk.offsets, chunk.sizes, strict=True))


def _within(box: Box, outer: Box) -> Box:
    return tuple((lo - a, hi - a) for (lo, hi), (a, _) in zip(box, outer, strict=True))


def _version(path: Path) -> int:
    try:
        return read_notes(path).version
    except (OSError, ValueError) as error:
        raise damaged(path, error) from error
