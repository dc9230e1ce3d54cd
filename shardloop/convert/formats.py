"""Which format a checkpoint is in, told by its files, and its reader. Called by `convert.sources`.

Floor 3.
"""

from pathlib import Path

from shardloop.checkpoint.folder import complete_checkpoints
from shardloop.checkpoint.plain import METADATA_FILE
from shardloop.convert.dcp_files import DCPReader
from shardloop.convert.hf_files import HFReader
from shardloop.convert.megatron_files import TRACKER as MEGATRON_TRACKER
from shardloop.convert.megatron_files import MegatronReader
from shardloop.convert.store import Reader
from shardloop.convert.zero3_files import OPTIM_STATES, Zero3Reader
from shardloop.convert.zero3_files import TRACKER as ZERO3_TRACKER
from shardloop.errors import CheckpointError, UsageError

FORMATS = {
    "hf": "Hugging Face safetensors",
    "dcp": "torch.distributed.checkpoint",
    "megatron": "Megatron-Core, one file per rank",
    "zero3": "DeepSpeed ZeRO-3",
}


def open_checkpoint(path: Path, *, given: str | None = None) -> Reader:
    """The reader of what is at `path`; nothing of the weights is loaded.

    A folder whose tracker file names the newest of Megatron's or DeepSpeed's checkpoints is that
    one.

    Args:
        given: what it must be: a format, or `megatron:` with the sizes of its axes.
    Raises:
        UsageError: there is nothing, nothing that is known, a run with several checkpoints, or
            something else than `given`. CheckpointError: it is damaged or incomplete. LayoutError:
            the sizes in `given`.
    """
    wanted, colon, _ = (given or "").partition(":")
    if given and (wanted not in FORMATS or (colon and wanted != "megatron")):
        raise UsageError(
            f"from={given!r} is no format; choose from {', '.join(FORMATS)}, or name Megatron's "
            "layout, such as megatron:tp=2,pp=2"
        )
    path = _tracked(path)
    found = _format(path)
    if wanted and wanted != found:
        raise UsageError(f"from={given!r}, but {path} is {found} ({FORMATS[found]})")
    match found:
        case "hf":
            return HFReader(path)
        case "dcp":
            return DCPReader(path)
        case "megatron":
            return MegatronReader(path, given if colon else None)
        case _:
            return Zero3Reader(path)


def _format(path: Path) -> str:
    if path.is_file() and path.suffix == ".safetensors":
        return "hf"
    if not path.exists():
        raise UsageError(f"{path}: no such path; give the folder of a checkpoint or a model")
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else [path.name]
    if METADATA_FILE in names:
        return "dcp"
    if any(name.startswith("mp_rank_") and (path / name).is_dir() for name in names):
        return "megatron"
    if any(OPTIM_STATES.fullmatch(name) for name in names):
        return "zero3"
    if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return "hf"
    raise UsageError(f"{path}: {_what_else(path, names)}")


def _what_else(path: Path, names: list[str]) -> str:
    inside = [p for folder in (path, path / "checkpoints") for p in complete_checkpoints(folder)]
    if (path / "export").is_dir():
        inside.append(path / "export")
    if inside:
        choices = ", ".join(str(checkpoint) for checkpoint in inside)
        return f"holds checkpoints; choose one: {choices}"
    if any(name.endswith((".bin", ".pth", ".pt")) for name in names):
        return (
            "pickled weights are not read in this form; save them as safetensors in a program "
            "that you trust"
        )
    known = ", ".join(FORMATS.values())
    return f"no checkpoint that is known ({known}); it has {', '.join(names[:5]) or 'nothing'}"


def _tracked(path: Path) -> Path:
    """What a tracker file of a framework points at, or the path itself."""
    for tracker in (MEGATRON_TRACKER, ZERO3_TRACKER):
        if not (path / tracker).is_file():
            continue
        text = (path / tracker).read_text(encoding="utf-8", errors="replace").strip()
        is_number = tracker == MEGATRON_TRACKER and text.isdigit()
        name = f"iter_{int(text):07d}" if is_number else text
        if Path(name).name != name or not (path / name).is_dir():
            raise CheckpointError(f"{path / tracker}: points at {name!r}, which is not there")
        return path / name
    return path
