"""What a model folder's weight files hold, from their headers: nothing is loaded. Floor 2.

Called by `hf.config`, so that weights that do not fit are refused before a process starts, and by
`hf.weights`.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from shardloop.errors import ModelError
from shardloop.families import CanonicalModel
from shardloop.hf.reading import as_model_error, read_json
from shardloop.layout.fit import shape_faults

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
MOST_TOLD = 20
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors writes it: F32, BF16, ..."""


def weight_files(model_dir: Path) -> list[Path]:
    """The files that hold a folder's weights, chosen as transformers does: one, or an index's.

    Raises:
        ModelError: there are none, or the index names files that are not there.
    """
    if (model_dir / WEIGHTS_FILE).is_file():
        return [model_dir / WEIGHTS_FILE]
    index = read_json(model_dir / INDEX_FILE)
    if index is None:
        raise ModelError(
            f"{model_dir}: no weights; put {WEIGHTS_FILE}, or its parts with {INDEX_FILE}, beside "
            "config.json"
        )
    weight_map = index.get("weight_map")
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelError(
            f"{model_dir / INDEX_FILE}: weight_map must give a file of the folder for each tensor; "
            "restore the file"
        )
    if not isinstance(index.get("metadata"), dict):
        raise ModelError(f"{model_dir / INDEX_FILE}: no object metadata; restore the file")
    files = [model_dir / name for name in sorted(names)]
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise ModelError(f"{model_dir}: no {', '.join(absent)}, named by {INDEX_FILE}; add it")
    return files


def check_weights(model_dir: Path, model: CanonicalModel) -> None:
    """Whether the files are whole and hold just the tensors of `model`, as floating-point numbers.

    A tied model may come with the alias of its head, if that is equal to the embedding.

    Raises:
        ModelError: lists the faults.
    """
    stored = read_headers(weight_files(model_dir))
    if model.tied and HEAD in stored:
        _check_alias(model_dir, stored)
        del stored[HEAD]
    faults = shape_faults(model.tensor_shapes(), stored)
    faults += [
        f"dtype of {name} is {tensor.dtype}, it must be one of {', '.join(DTYPES)}"
        for name, tensor in stored.items()
        if tensor.dtype not in DTYPES
    ]
    if faults:
        more = f"; and {len(faults) - MOST_TOLD} more" if len(faults) > MOST_TOLD else ""
        raise ModelError(
            f"{model_dir}: weights and config.json do not fit each other; "
            f"{'; '.join(faults[:MOST_TOLD])}{more}"
        )


def read_headers(files: list[Path]) -> dict[str, Stored]:
    """What the files hold, by name.

    Raises:
        ModelError: a file cannot be read, or two hold a tensor of one name.
    """
    stored: dict[str, Stored] = {}
    for path in files:
        with as_model_error(f"{path}: the weights cannot be read"), safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                if name in stored:
                    raise ModelError(f"{path}: has {name}, which {stored[name].path.name} has too")
                tensor = file.get_slice(name)
                stored[name] = Stored(path, tuple(tensor.get_shape()), tensor.get_dtype())
    return stored


def _check_alias(model_dir: Path, stored: dict[str, Stored]) -> None:
    embedding = stored.get(EMBEDDING)
    if embedding is None:
        return
    head = stored[HEAD]
    alike = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    if not alike or not torch.equal(_load(head, HEAD), _load(embedding, EMBEDDING)):
        raise ModelError(
            f"{model_dir}: tie_word_embeddings=true in config.json, but {HEAD} is there and differs"
            f" from {EMBEDDING}; set tie_word_embeddings to false, or remove {HEAD}"
        )


def _load(tensor: Stored, name: str) -> Tensor:
    with safe_open(tensor.path, "pt") as file:
        return file.get_tensor(name)
