"""What a checkpoint's folder holds, without its tensors, and what to say of a damaged one. Floor 3.

Called by `checkpoint.reading`, and by whoever looks into a checkpoint.
"""

from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from shardloop.checkpoint.folder import complete_checkpoints
from shardloop.checkpoint.notes import Restored, read_notes
from shardloop.checkpoint.plain import load_metadata
from shardloop.errors import CheckpointError

_SHOWN_CHARACTERS = 160


def read_metadata(path: Path) -> Metadata:
    """Names, shapes, dtypes and places of the tensors in a folder of torch.distributed.checkpoint.

    Raises:
        CheckpointError: it cannot be read, or a file is missing or shorter than it says.
    """
    try:
        return load_metadata(path)
    except Exception as error:  # damaged files can raise anything
        raise damaged(path, error) from error


def read_saved(path: Path) -> tuple[Metadata, Restored]:
    """The tensors' metadata and the notes.

    Raises:
        CheckpointError: as `read_metadata`, or the notes are not those that were saved.
    """
    try:
        return load_metadata(path), read_notes(path)
    except Exception as error:  # damaged files can raise anything
        raise damaged(path, error) from error


def damaged(path: Path, cause: BaseException) -> CheckpointError:
    """What to say of a checkpoint that cannot be read, and which one to go on from."""
    text = " ".join(str(cause).split())
    if not isinstance(cause, CheckpointError):
        text = f"{type(cause).__name__}: {text}".removesuffix(": ")
    if len(text) > _SHOWN_CHARACTERS:
        text = f"{text[:_SHOWN_CHARACTERS]}…"
    older = next((p for p in reversed(_older(path)) if _is_intact(p)), None)
    if older is None:
        advice = "there is no older intact checkpoint beside it; start again"
    else:
        advice = f"older intact checkpoint: {older.name}; delete this folder to go on from it"
    return CheckpointError(f"damaged ({text}); {advice}")


def _older(path: Path) -> list[Path]:
    checkpoints = complete_checkpoints(path.parent)
    return checkpoints[: checkpoints.index(path)] if path in checkpoints else []


def _is_intact(path: Path) -> bool:
    try:
        load_metadata(path)
        read_notes(path)
    except Exception:
        return False
    return True
