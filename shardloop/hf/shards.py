"""Safetensors written one tensor at a time, in one file or in shards with an index. Floor 2.

Called by `hf.weights` and by conversions of checkpoints. A file is 8 bytes with the length of its
header, the header (JSON: dtype, shape and place of each tensor), then the tensors one after the
other, so all that must be known in advance is shapes and dtypes.

    old weights removed ──▶ *.part, tensor by tensor ──▶ shards named ──▶ index: now complete
"""

import json
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shardloop.hf.headers import INDEX_FILE, WEIGHTS_FILE

MAX_SHARD_BYTES = 5 * 10**9
"""Of a file, unless a single tensor is larger."""
SAFETENSORS_NAME = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
}
ALIGNMENT = 8
"""Bytes of which a header has a multiple."""


class TensorSpec(NamedTuple):
    """What is to be written under a name."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_weights(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    read: Callable[[str], Tensor],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[str]:
    """Replace a folder's weights. What is there half way is no model: the name that makes it one
    (the only file, or the index) comes last.

    Args:
        read: gives each tensor once, on the CPU; it is asked for the next when the last is written.
            Tensors of one dtype are asked for in the order of `specs`.
    Returns:
        The names of the files.
    Raises:
        OSError: a file cannot be written. Whatever `read` raises.
    """
    for old in (WEIGHTS_FILE, INDEX_FILE):
        (folder / old).unlink(missing_ok=True)
    for old_shard in folder.glob("model-*-of-*.safetensors"):
        old_shard.unlink()
    shards = _shards(specs, max_shard_bytes)
    names = [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else WEIGHTS_FILE
        for i in range(len(shards))
    ]
    for file, shard in zip(names, shards, strict=True):
        write_file(folder / f"{file}.part", {name: specs[name] for name in shard}, read)
    for file in names:
        os.replace(folder / f"{file}.part", folder / file)
    if len(shards) > 1:
        _write_index(folder, specs, dict(zip(names, shards, strict=True)))
        names.append(INDEX_FILE)
    return names


def write_file(path: Path, specs: Mapping[str, TensorSpec], read: Callable[[str], Tensor]) -> None:
    """One safetensors file. Wide dtypes come first, so that every tensor is aligned to its own.

    Raises:
        OSError: it cannot be written. Whatever `read` raises.
    """
    order = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    with path.open("wb") as file:
        file.write(_header({name: specs[name] for name in order}))
        for name in order:
            file.write(_octets(read(name), specs[name]))  # no name keeps it while the next is read


def _octets(tensor: Tensor, spec: TensorSpec) -> memoryview:
    assert (tuple(tensor.shape), tensor.dtype) == spec, f"{tensor.shape} {tensor.dtype}, not {spec}"
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return octets.numpy().data


def _header(specs: Mapping[str, TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, spec in specs.items():
        entries[name] = {
            "dtype": SAFETENSORS_NAME[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [start, start + spec.num_bytes],
        }
        start += spec.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _shards(specs: Mapping[str, TensorSpec], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, spec in specs.items():
        if shards[-1] and filled + spec.num_bytes > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += spec.num_bytes
    return shards


def _write_index(
    folder: Path, specs: Mapping[str, TensorSpec], shards: Mapping[str, list[str]]
) -> None:
    content = {
        "metadata": {"total_size": sum(spec.num_bytes for spec in specs.values())},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    unfinished = folder / f"{INDEX_FILE}.part"
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, folder / INDEX_FILE)
