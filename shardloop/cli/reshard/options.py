"""The options that name a model and two layouts, and the request they make. Floor 5.

Called by `cli.reshard.commands`.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardloop.cli.reshard.facts import spans
from shardloop.cli.reshard.request import GB_PER_S, Request
from shardloop.errors import ModelError, UsageError
from shardloop.families.public import public_model
from shardloop.layout.parse import MOST_RANKS

Dtype = Literal["bf16", "fp16", "fp32"]
MAX_RANKS = 2 * MOST_RANKS
"""What two of the largest layouts have."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The model and the two layouts."""

    model: str | None = None
    """A public model's name, such as Qwen3-0.6B or DeepSeek-V3, a model folder or a config.json.
    No weights are read."""
    src: str | None = None
    """Layout that the weights come from, such as fsdp=8 or fsdp=4,tp=2."""
    dst: str | None = None
    """Layout that they go to, such as engine:tp=4."""
    dtype: Dtype = "bf16"
    """What the weights are sent in. Scales and other tensors with a dtype of their own keep it."""
    colocate: bool = False
    """Both layouts begin at rank 0. Otherwise the destination has the ranks after the source."""
    src_ranks: str | None = None
    """Ranks of the source, such as 0-7 or 0-3,8-11, in the layout's order."""
    dst_ranks: str | None = None
    """Ranks of the destination."""
    lost: str | None = None
    """Ranks that have failed and send nothing, such as 3,5."""
    lora: int | None = None
    """Plan the LoRA factors of this rank, of every linear layer, and nothing else."""
    fp8: bool = False
    """The model's linear weights are FP8, with a scale for each block of 128 x 128."""


def asked(options: Options, *, gb_per_s: float = GB_PER_S, rank: int | None = None) -> Request:
    """The request of the command line.

    Raises:
        UsageError: options are missing, are no ranks, or as `Request`. ModelError: as
            `model_config`.
    """
    named = {"--model": options.model, "--src": options.src, "--dst": options.dst}
    missing = [flag for flag, value in named.items() if value is None]
    if missing:
        raise UsageError(f"{', '.join(missing)} missing; name a model and two layouts")
    return Request(
        model=str(options.model),
        config=model_config(str(options.model)),
        src=str(options.src),
        dst=str(options.dst),
        dtype=options.dtype,
        colocate=options.colocate,
        src_ranks=None if options.src_ranks is None else ranks_of(options.src_ranks),
        dst_ranks=None if options.dst_ranks is None else ranks_of(options.dst_ranks),
        lost=() if options.lost is None else ranks_of(options.lost),
        lora=options.lora,
        fp8=options.fp8,
        gb_per_s=gb_per_s,
        rank=rank,
    )


def model_config(text: str) -> Mapping[str, Any]:
    """The config of a public model, of a model folder, or in a file.

    Raises:
        ModelError: there is no such name, folder or file, or the file is no JSON object.
    """
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    elif not path.is_file() and path.suffix != ".json" and len(path.parts) < 2:
        return public_model(text)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path}: cannot be read as a model's config: {error}; give a public model's name, a "
            "model folder or a config.json"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path}: holds no JSON object; give a model's config.json")
    return config


def ranks_of(text: str) -> tuple[int, ...]:
    """The ranks that a text such as `0-3,8` lists, in its order.

    Raises:
        UsageError: a part of it is no rank and no range, a rank is too large or occurs twice.
    """
    ranks: list[int] = []
    for item in text.split(","):
        first, dash, last = (part.strip() for part in item.partition("-"))
        bounds = (first, last) if dash else (first, first)
        if not all(bound.isascii() and bound.isdigit() for bound in bounds):
            raise UsageError(f"ranks {text!r}: {item!r} is no rank; write for example 0-3,8")
        if max(map(len, bounds)) > len(str(MAX_RANKS)) or max(map(int, bounds)) >= MAX_RANKS:
            raise UsageError(f"ranks {text!r}: {item!r}; choose ranks below {MAX_RANKS}")
        low, high = map(int, bounds)
        if high < low:
            raise UsageError(f"ranks {text!r}: {item!r} runs backwards; write {high}-{low}")
        ranks += range(low, high + 1)
    twice = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
    if twice:
        raise UsageError(f"ranks {text!r}: {spans(twice)} occur twice; name each rank once")
    return tuple(ranks)
