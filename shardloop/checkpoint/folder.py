"""Names of checkpoints, which are complete, and how one appears, is replaced and removed. Floor 3.

Called by `checkpoint.writing` and `checkpoint.metadata`, by the run and the command line.

    .step-000050.unfinished/ ──complete and on the disk──▶ rename ──▶ step-000050/

One that is replaced is called step-000050.old from just before the rename until just after it, and
is found under that name: a process may be killed anywhere and there is one to load. What a killed
one left behind is removed by the next save or prune. A folder gets its name only when its files
have reached the disk, and the name is there before an older checkpoint goes: the same holds when
the machine itself stops.
"""

import os
import re
import shutil
from pathlib import Path

from shardloop.checkpoint.notes import TRAINER_FILE
from shardloop.errors import CheckpointError

_NAME = re.compile(r"step-(\d{6,})(\.old)?")
_STALE = re.compile(r"\.step-\d{6,}(\.old)?\.(unfinished|removed)")


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def unfinished_name(path: Path) -> Path:
    """Where the checkpoint `path` is written until it is complete."""
    return path.with_name(f".{path.name}.unfinished")


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`, or None."""
    found = complete_checkpoints(folder)
    return found[-1] if found else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """By rising step; one that was set aside counts where its successor is missing."""
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), match[2] is None, path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and is_complete(path)
    ]
    by_step = {step: path for step, _, path in sorted(found)}
    return list(by_step.values())


def is_complete(path: Path) -> bool:
    return (path / TRAINER_FILE).is_file()


def prune_checkpoints(folder: Path, *, keep: int) -> None:
    """Removes all but the `keep` (1 or more) newest checkpoints. One process calls, while no other
    saves: what an earlier, killed process left behind goes as well.

    Raises:
        CheckpointError: one cannot be removed.
    """
    try:
        remove_stale(folder)
        for path in complete_checkpoints(folder)[:-keep]:
            # Renamed first: a crash half way leaves nothing that looks like a checkpoint.
            doomed = path.with_name(f".{path.name}.removed")
            os.rename(path, doomed)
            remove(doomed)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot remove an old checkpoint: {error}") from error


def publish(unfinished: Path, path: Path) -> None:
    """Gives a complete folder its name; what had the name before goes."""
    old = path.with_name(f"{path.name}.old")
    is_replaced = is_complete(path)
    # Of `path` and `old` one at least is complete after each of these steps if one was before.
    remove(old if is_replaced else path)
    if is_replaced:
        os.rename(path, old)
    try:
        os.rename(unfinished, path)
    except OSError:
        if is_replaced:
            os.rename(old, path)
        raise
    sync_to_disk(path.parent)
    remove(old)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_stale(folder: Path) -> None:
    """Removes what killed saves and prunes left in `folder`, and nothing that is worth loading."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        replaced = match and match[2] and is_complete(path.with_name(path.name[: -len(match[2])]))
        if replaced or _STALE.fullmatch(path.name):
            remove(path)


def sync_to_disk(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
