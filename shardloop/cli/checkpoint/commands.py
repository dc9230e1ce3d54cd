"""`shardloop checkpoint inspect`, `convert` and `verify`. Called by `cli.main`. Floor 5."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from shardloop.cli.checkpoint.progress import ProgressLine
from shardloop.cli.checkpoint.words import document, lines
from shardloop.cli.reshard.options import model_config
from shardloop.convert import Source, convert, differing, open_source, parse_target, source_faults
from shardloop.convert.check import element_faults
from shardloop.convert.formats import open_checkpoint
from shardloop.convert.look import places
from shardloop.convert.sources import config_near
from shardloop.convert.store import Reader, listed
from shardloop.errors import CheckpointError, FingerprintError, ModelError, UsageError
from shardloop.families import FAMILIES, canonical_model
from shardloop.hf.reading import read_json
from shardloop.hf.shards import MAX_SHARD_BYTES
from shardloop.reshard.cost import bytes_text

Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
From = Annotated[str | None, tyro.conf.arg(name="from", metavar="FORMAT")]
PathArgument = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PATH")]


@dataclass(frozen=True, kw_only=True)
class InspectCommand:
    """Tell what a checkpoint is: format, layout, tensors, files. No weights are read."""

    path: PathArgument
    """A model folder, a safetensors file, a folder of torch.distributed.checkpoint (a run's
    checkpoints/step-NNNNNN among them), or one of Megatron-Core or DeepSpeed ZeRO-3."""
    from_: From = None
    """What it is: hf, dcp, zero3, or Megatron's layout such as megatron:ep=2,tp=2."""
    model: str | None = None
    """Its config.json, a model folder or a public model's name; by default the config.json in the
    checkpoint or near it."""
    tensor: str | None = None
    """Tell where the parts of this tensor lie."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True, kw_only=True)
class ConvertCommand:
    """Write a checkpoint in another format and layout, never with all of it in memory."""

    src: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SRC")]
    """What to convert, as for inspect."""
    dst: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """The folder to write; it must not exist."""
    from_: From = None
    """As for inspect."""
    to: str = "hf"
    """hf, dcp, or Megatron's layout such as megatron:tp=2,pp=2."""
    model: str | None = None
    """Its config.json or a model folder, as for inspect. The tokenizer is copied from there too."""
    dtype: Dtype | None = None
    """Convert the weights to this; by default every tensor keeps its own. Tensors with a fixed
    dtype, such as FP8 weights and their scales, keep it always."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    """Most bytes of one safetensors file, if a single tensor is not larger."""


@dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Check a checkpoint: files whole, names and shapes the model's, every element finite; or equal
    to another."""

    path: PathArgument
    """As for inspect."""
    against: Path | None = None
    """Another checkpoint of the model, in any format and layout: every element must be equal."""
    from_: From = None
    """As for inspect."""
    model: str | None = None
    """As for inspect."""
    dtype: Dtype | None = None
    """With --against: compare both after conversion to this."""


EXAMPLES = """\
examples:
  shardloop checkpoint inspect runs/x/export
  shardloop checkpoint inspect iter_0000100 --tensor model.layers.0.self_attn.k_proj.weight
  shardloop checkpoint convert runs/x/checkpoints/step-000050 exported --to hf --dtype bf16
  shardloop checkpoint convert Qwen3-0.6B ranks --to megatron:pp=2,tp=2
  shardloop checkpoint convert ranks back --from megatron:pp=2,tp=2
  shardloop checkpoint convert global_step100 exported --model config.json
  shardloop checkpoint verify exported --against runs/x/checkpoints/step-000050 --dtype bf16
"""


def run(arguments: Sequence[str]) -> int:
    """
    Raises:
        ShardloopError: see `shardloop.errors`; a destination is there only if it is whole.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        for name, (command, _) in ACTIONS.items():
            with suppress(SystemExit):
                tyro.cli(command, prog=f"shardloop checkpoint {name}", args=["--help"])
        print(EXAMPLES, end="")
        raise SystemExit(0 if arguments else 2)
    name, *rest = arguments
    if name not in ACTIONS:
        raise UsageError(f"no command checkpoint {name!r}; choose from {', '.join(ACTIONS)}")
    command, act = ACTIONS[name]
    act(tyro.cli(command, prog=f"shardloop checkpoint {name}", args=rest))
    return 0


def _inspect(command: InspectCommand) -> None:
    reader = open_checkpoint(command.path, given=command.from_)
    source = _source_or_reason(command.path, command.from_, command.model)
    found = None
    if command.tensor is not None:
        fitting = source if isinstance(source, Source) and not source_faults(source) else None
        found = places(reader, fitting, command.tensor)
    facts = document(reader, source, found)
    text = json.dumps(facts, indent=1) if command.json else "\n".join(lines(facts))
    print(text)


def _convert(command: ConvertCommand) -> None:
    if command.max_shard_bytes < 1:
        raise UsageError(f"max-shard-bytes={command.max_shard_bytes}; choose 1 or more")
    target = parse_target(command.to, max_shard_bytes=command.max_shard_bytes)
    model = _model(command.model)
    if model and model["folder"] is None:
        raise UsageError(
            f"model={command.model!r} is known by its sizes alone, which is no config.json to write"
            " beside weights; give a config.json or a model folder"
        )
    source = open_source(command.src, given=command.from_, **model)
    with ProgressLine() as progress:
        report = convert(
            source, target, command.dst, dtype=_dtype(command.dtype), progress=progress
        )
    changed = ", ".join(f"{count} tensors {what}" for what, count in report.converted.items())
    print(report.proof)
    print(
        f"{report.path}: {report.num_tensors} tensors, {bytes_text(report.num_bytes)}, as "
        f"{command.to}; dtypes: {changed or 'as they were'}; fingerprints equal the source's"
    )


def _verify(command: VerifyCommand) -> None:
    if command.dtype is not None and command.against is None:
        raise UsageError("--dtype says what to compare in; add --against OTHER")
    known = _source_or_reason(command.path, command.from_, command.model)
    source = known if isinstance(known, Source) else None
    reader = open_checkpoint(command.path, given=command.from_) if source is None else source.reader
    if source is None:
        _demand_sound_config(reader)
    faults = [] if source is None else source_faults(source)
    with ProgressLine() as progress:
        faults += element_faults(reader, progress=progress)
    if faults:
        raise CheckpointError(f"{command.path}: {len(faults)} faults:{listed(faults)}")
    count = sum(1 for _ in reader.everything())
    print(f"{command.path}: {count} tensors, all whole, every element finite")
    if source is None:
        print(f"names and shapes were not checked: {known}")
    else:
        print(f"names, shapes and dtypes are those of its model ({source.model.name})")
    if command.against is not None:
        _compare(command, source)


def _compare(command: VerifyCommand, source: Source | None) -> None:
    assert command.against is not None
    other = open_source(command.against, **_model(command.model))
    mine = source or open_source(command.path, given=command.from_, config=other.config)
    for side in (mine, other):
        if faults := source_faults(side):
            raise CheckpointError(f"{side.reader.path}: does not fit its model:{listed(faults)}")
    dtype = _dtype(command.dtype)
    dtypes = None
    if dtype is not None:
        own = mine.declared_dtypes
        dtypes = {name: own.get(name, dtype) for name in mine.model.tensor_shapes()}
    with ProgressLine() as progress:
        faults = differing(mine, other, dtypes=dtypes, progress=progress)
    if faults:
        raise FingerprintError(
            f"{command.path} and {command.against}: {len(faults)} tensors differ:{listed(faults)}"
        )
    print(f"equal to {command.against}, element by element (fingerprints)")


def _source_or_reason(path: Path, given: str | None, model: str | None) -> Source | str:
    """The reason where no config near it says what the model is, or one that is not understood."""
    if model is not None:
        return open_source(path, given=given, **_model(model))
    open_checkpoint(path, given=given)
    try:
        return open_source(path, given=given)
    except ModelError as error:
        return str(error)


def _demand_sound_config(reader: Reader) -> None:
    """A model of another family cannot be checked, but one of ours with wrong sizes is wrong.

    Raises:
        ModelError: names the field.
    """
    folder = config_near(reader.path)
    config = None if folder is None else read_json(folder / "config.json")
    if config is None or config.get("model_type") not in list(FAMILIES):
        return
    try:
        canonical_model(config)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error


def _model(text: str | None) -> Mapping[str, Any]:
    if text is None:
        return {}
    path = Path(text)
    folder = path if path.is_dir() else path.parent if path.is_file() else None
    return {"config": model_config(text), "folder": folder}


def _dtype(name: Dtype | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]


ACTIONS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "inspect": (InspectCommand, _inspect),
    "convert": (ConvertCommand, _convert),
    "verify": (VerifyCommand, _verify),
}
