"""Files of torch.distributed.checkpoint, read without trusting them. Floor 3.

Called by `checkpoint.metadata`, `checkpoint.reading` and `convert.dcp_files`. The metadata
is a pickle: only the classes that describe tensors are made from it, and nothing else is called.
"""

import pickle
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shardloop.checkpoint.chunks import load_chunk
from shardloop.errors import CheckpointError
from shardloop.layout.layout import box_of

METADATA_FILE = ".metadata"
CHECKPOINT = "torch.distributed.checkpoint"
ALLOWED = {
    f"{CHECKPOINT}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{CHECKPOINT}.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size", "device"},
    "torch.serialization": {"_get_layout"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = name in ALLOWED.get(module, ())
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            allowed = True
        if not allowed:
            raise CheckpointError(f"it calls {module}.{name}, which metadata does not need")
        return super().find_class(module, name)


def load_metadata(path: Path) -> Metadata:
    """Names, shapes, dtypes and places of the tensors in a folder.

    Raises:
        CheckpointError: it needs what is not allowed, a file is missing or shorter than it says, or
            a tensor is not all there; all files and tensors are named. Any Exception: it is
            damaged, and no pickle, or one of anything.
    """
    with (path / METADATA_FILE).open("rb") as file:
        metadata = _Unpickler(file).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"it is not the metadata of {CHECKPOINT}")
    faults = [*_file_faults(path, metadata), *_chunk_faults(metadata)]
    if faults:
        raise CheckpointError("; ".join(faults))
    return metadata


class PlainReader(FileSystemReader):
    """Torch's reader of tensors, with its files read by `load_metadata` and `load_chunk`: each
    chunk once, whole, whatever part of it is asked for, so that its checksum can be looked at."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return load_metadata(Path(self.path))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_chunk: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_chunk[item.storage_index].append(item)
        for index, items in by_chunk.items():
            place = self.storage_data[index]
            try:
                chunk = load_chunk(Path(self.path), place)
            except Exception as error:  # damaged bytes can raise anything
                raise CheckpointError(f"{index.fqn} in {place.relative_path}: {error}") from error
            for item in items:
                runs = zip(item.storage_offsets, item.lengths, strict=True)
                target = planner.resolve_tensor(item).detach()
                target.copy_(box_of(chunk, tuple((lo, lo + n) for lo, n in runs)))
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _file_faults(path: Path, metadata: Metadata) -> Iterator[str]:
    sizes: dict[str, int] = {}
    for entry in metadata.storage_data.values():
        end = entry.offset + entry.length
        sizes[entry.relative_path] = max(end, sizes.get(entry.relative_path, 0))
    for name, size in sorted(sizes.items()):
        file = path / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            yield f"{name} is outside the folder"
        elif not file.is_file():
            yield f"no file {name}"
        elif (found := file.stat().st_size) < size:
            yield f"{name} has {found} bytes of {size}"


def _chunk_faults(metadata: Metadata) -> Iterator[str]:
    stored = {(index.fqn, index.offset) for index in metadata.storage_data}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if not isinstance(entry.properties.dtype, torch.dtype):
            yield f"{key} has the dtype {entry.properties.dtype!r}"
        have = sum(chunk.sizes.numel() for chunk in entry.chunks)
        if have != entry.size.numel():
            yield f"{key} has {have} elements of {entry.size.numel()}"
        elif not _is_covered(entry):
            yield f"{key} has chunks that overlap or lie outside it"
        yield from (
            f"{key} at {list(chunk.offsets)} is in no file"
            for chunk in entry.chunks
            if chunk.sizes.numel() and (key, chunk.offsets) not in stored
        )


def _is_covered(entry: TensorStorageMetadata) -> bool:
    """Whether chunks of as many elements as the tensor has lie within it, and are disjoint."""
    chunks = [chunk for chunk in entry.chunks if chunk.sizes.numel()]
    shape = (len(chunks), len(entry.size))
    lo = np.array([chunk.offsets for chunk in chunks], np.int64).reshape(shape)
    hi = lo + np.array([chunk.sizes for chunk in chunks], np.int64).reshape(shape)
    if (lo < 0).any() or (hi > np.array(entry.size, np.int64)).any():
        return False
    meet = np.ones((len(chunks), len(chunks)), bool)
    for dim in range(len(entry.size)):
        meet &= np.less.outer(lo[:, dim], hi[:, dim]) & np.greater.outer(hi[:, dim], lo[:, dim])
    return int(meet.sum()) == len(chunks)
