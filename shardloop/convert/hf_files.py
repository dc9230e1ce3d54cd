"""Hugging Face safetensors: whole tensors under their own names. Called by `convert.formats`.

Floor 3.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from shardloop.convert.damage import damaged
from shardloop.convert.store import Stored, UnchunkedReader
from shardloop.errors import CheckpointError, ModelError
from shardloop.hf.headers import INDEX_FILE, WEIGHTS_FILE, read_headers, weight_files
from shardloop.hf.reading import read_json
from shardloop.hf.shards import SAFETENSORS_NAME
from shardloop.layout.layout import Box

DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAME.items()} | {
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class HFReader(UnchunkedReader):
    format = "hf"
    spec = "tp=1"
    num_ranks = 1

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: a model folder, or one safetensors file.
        Raises:
            CheckpointError: files are missing or damaged, or the index does not fit them.
        """
        self.path = path
        self.notes: Mapping[str, str] = {}
        self._open: dict[Path, safe_open] = {}
        try:
            headers = read_headers([path] if path.is_file() else weight_files(path))
            _check_index(path, {name: stored.path for name, stored in headers.items()})
        except ModelError as error:
            raise CheckpointError(str(error)) from error
        unknown = sorted({stored.dtype for stored in headers.values()} - DTYPES.keys())
        if unknown:
            raise CheckpointError(
                f"{path}: dtypes {', '.join(unknown)} are not read; choose from {', '.join(DTYPES)}"
            )
        self._tensors = {
            name: Stored(stored.shape, DTYPES[stored.dtype], (stored.path,))
            for name, stored in headers.items()
        }

    def tensors(self, rank: int) -> dict[str, Stored]:
        return self._tensors

    def read(self, rank: int, name: str, box: Box) -> Tensor:
        (path,) = self._tensors[name].files
        try:
            if path not in self._open:
                self._open[path] = safe_open(path, "pt")
            part: Tensor = self._open[path].get_slice(name)[tuple(slice(*run) for run in box)]
        except Exception as error:  # safetensors' own errors have no common base
            raise damaged(path, error) from error
        return part


def _check_index(path: Path, places: Mapping[str, Path]) -> None:
    """
    Raises:
        CheckpointError: the index says another file of a tensor than has it; all are named.
    """
    has_one_file = path.is_file() or (path / WEIGHTS_FILE).is_file()
    index = None if has_one_file else read_json(path / INDEX_FILE)
    if index is None:
        return
    told = index.get("weight_map", {})
    faults = [
        f"{name} in {told.get(name, 'no file')}, it is in "
        f"{places[name].name if name in places else 'none'}"
        for name in {**told, **places}
        if name not in places or told.get(name) != places[name].name
    ]
    if faults:
        raise CheckpointError(f"{path / INDEX_FILE}: says wrongly: {'; '.join(faults)}")
