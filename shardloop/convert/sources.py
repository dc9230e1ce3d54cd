"""A checkpoint together with its model: how its ranks hold it, and what does not fit. Floor 3.

Called by `shardloop checkpoint`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardloop.convert.formats import open_checkpoint
from shardloop.convert.store import Reader, Stored, whole
from shardloop.errors import CheckpointError, ModelError
from shardloop.families import CanonicalModel, canonical_model
from shardloop.families.base import by_name
from shardloop.families.fp8 import with_block_fp8
from shardloop.hf.headers import EMBEDDING, HEAD
from shardloop.hf.reading import read_json
from shardloop.layout import Layout, make_layout
from shardloop.layout.fit import shape_faults

PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of weights whose dtype the model leaves open."""


@dataclass(frozen=True, kw_only=True)
class Source:
    reader: Reader
    layout: Layout
    config: Mapping[str, Any]
    """Of the model: the content of its config.json."""
    folder: Path | None
    """Where that was, and perhaps a tokenizer."""

    @property
    def model(self) -> CanonicalModel:
        return self.layout.model

    def tensors(self, rank: int) -> dict[str, Stored]:
        """What a rank holds, without the alias of a tied head."""
        return {n: t for n, t in self.reader.tensors(rank).items() if not self._is_alias(n)}

    def _is_alias(self, name: str) -> bool:
        return self.model.tied and name == HEAD and self.layout.spec == "tp=1"

    @cached_property
    def declared_dtypes(self) -> dict[str, torch.dtype]:
        """By canonical name, where the model says one."""
        classes = by_name(self.model.classes)
        return {name: getattr(torch, c.dtype) for name, c in classes if c.dtype is not None}

    def dtypes(self) -> dict[str, torch.dtype]:
        """By canonical name, of a source without faults."""
        return {
            piece.name: tensors[piece.local_name].dtype
            for rank in range(self.layout.world_size)
            for tensors in [self.tensors(rank)]
            for piece in self.layout.pieces(rank)
        }


def open_source(
    path: Path,
    *,
    given: str | None = None,
    config: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> Source:
    """
    Args:
        given: as `open_checkpoint`.
        config: of the model; None: the config.json in or near `path` (see `config_near`).
        folder: where `config` was, if it was in a model folder.
    Raises:
        UsageError, CheckpointError, LayoutError: as `open_checkpoint`. CheckpointError: the
            config.json near it is damaged. ModelError: the config is missing or of no known model.
    """
    reader = open_checkpoint(path, given=given)
    if config is None:
        folder = config_near(reader.path)
        config = None if folder is None else _config_of(folder)
    if config is None:
        raise ModelError(
            f"{path}: no config.json in it or near it, so its tensors cannot be told; name the "
            "model with --model (a config.json, a model folder or a public model's name)"
        )
    layout = make_layout(model_of(config), reader.spec)
    return Source(reader=reader, layout=layout, config=config, folder=folder)


def _config_of(folder: Path) -> dict[str, Any] | None:
    try:
        return read_json(folder / "config.json")
    except ModelError as error:
        raise CheckpointError(str(error)) from error


def config_near(path: Path) -> Path | None:
    """The folder of the config.json that belongs to a checkpoint: itself, what holds it (Megatron's
    and DeepSpeed's folders), or the run's start or export (our own checkpoints)."""
    here = path.parent if path.is_file() else path
    run = here.parent.parent
    places = [here, here.parent]
    if (run / "manifest.json").is_file():
        places += [run / "export", run / "start"]
    return next((place for place in places if (place / "config.json").is_file()), None)


def model_of(config: Mapping[str, Any]) -> CanonicalModel:
    """The tensors of a model as its checkpoint has them, FP8 scales included.

    Raises:
        ModelError: as `canonical_model`, or weights are quantised in an unknown way.
    """
    model = canonical_model(config)
    quantised = config.get("quantization_config")
    if quantised is None:
        return model
    told = quantised if isinstance(quantised, Mapping) else {}
    sizes = told.get("weight_block_size")
    sizes = sizes if isinstance(sizes, list) else []
    if told.get("quant_method") != "fp8" or len(sizes) != 2 or sizes[0] != sizes[1]:
        raise ModelError(
            f"quantization_config={quantised}; only fp8 in square blocks (weight_block_size) is "
            "known"
        )
    return with_block_fp8(model, block=sizes[0])


def source_faults(source: Source) -> list[str]:
    """Every tensor that is missing, unexpected, of another shape, or of a dtype that it cannot
    have; and a head that should be tied but is not. Reads no weights but those of such a head."""
    faults = []
    for rank in range(source.layout.world_size):
        stored = source.tensors(rank)
        where = f"rank {rank}: " if source.layout.world_size > 1 else ""
        expected, declared = source.layout.local_shapes(rank), source.layout.local_dtypes(rank)
        faults += [where + fault for fault in shape_faults(expected, stored)]
        faults += [
            where + fault
            for name, tensor in stored.items()
            if name in expected
            for fault in _dtype_faults(name, tensor, declared[name])
        ]
    if not faults:
        faults += [*_mixed_faults(source), *_alias_faults(source)]
    return faults


def _dtype_faults(name: str, tensor: Stored, declared: str | None) -> Iterator[str]:
    allowed = PLAIN if declared is None else (getattr(torch, declared),)
    if tensor.dtype not in allowed:
        yield (
            f"dtype of {name} is {tensor.dtype}, it must be one of "
            f"{', '.join(str(dtype) for dtype in allowed)}"
        )


def _mixed_faults(source: Source) -> Iterator[str]:
    """A canonical tensor that is in one dtype here and in another there."""
    first: dict[str, torch.dtype] = {}
    for rank in range(source.layout.world_size):
        tensors = source.tensors(rank)
        for piece in source.layout.pieces(rank):
            here = tensors[piece.local_name].dtype
            if (there := first.setdefault(piece.name, here)) != here:
                yield f"rank {rank}: {piece.name} is {here}, on a rank before it is {there}"


def _alias_faults(source: Source) -> Iterator[str]:
    stored = source.reader.tensors(0)
    if not source._is_alias(HEAD) or HEAD not in stored:
        return
    head, embedding = (_whole(source.reader, stored[name], name) for name in (HEAD, EMBEDDING))
    if head.dtype != embedding.dtype or not torch.equal(head, embedding):
        yield f"{HEAD} differs from {EMBEDDING}, but the config ties them"


def _whole(reader: Reader, stored: Stored, name: str) -> Tensor:
    return reader.read(0, name, whole(stored.shape))
