"""Sharded checkpoints: written whole or not at all, readable at any number of ranks. Floor 3.

Called by the trainer (save, load) and by the run (latest, prune). One checkpoint is a folder:

    step-000050/
      .metadata, __0_0.distcp …   tensors, each rank its own shards (torch.distributed.checkpoint)
      driver.json                 whatever the driver wants back
      trainer.json                version of the weights; written last: it makes the folder complete

    .step-000050.unfinished/ ──all ranks wrote──▶ json ──▶ rename ──▶ step-000050/
                │
                └── any rank failed: all have stopped, removed, CheckpointError on every rank

One that is replaced is called step-000050.old from just before the rename until just after it, and
is found under that name: a process may be killed anywhere and there is one to load. What a killed
one left behind is removed by the next save or prune.

The metadata is a pickle: load only checkpoints that you trust.
"""

import json
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardloop.errors import CheckpointError
from shardloop.parallel.agree import together

TRAINER_FILE = "trainer.json"
DRIVER_FILE = "driver.json"
_NAME = re.compile(r"step-(\d{6,})(\.old)?")
_STALE = re.compile(r"\.step-\d{6,}(\.old)?\.(unfinished|removed)")
_DRIVER_CRC = "driver_crc32"
_DAMAGE = (
    CheckpointError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    AttributeError,
    ImportError,
    pickle.UnpicklingError,
)
"""What reading files of any content can raise; a pickle has its say in most of them."""
_SHOWN_KEYS = 3
_SHOWN_CHARACTERS = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    version: int
    extra: dict[str, Any]
    """What the driver stored beside the tensors."""


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def latest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step in `folder`, or None."""
    found = _checkpoints(folder)
    return found[-1] if found else None


def prune_checkpoints(folder: Path, *, keep: int) -> None:
    """Removes all but the `keep` (1 or more) newest checkpoints. One process calls, while no other
    saves: what an earlier, killed process left behind goes as well.

    Raises:
        CheckpointError: one cannot be removed.
    """
    try:
        _remove_stale(folder)
        for path in _checkpoints(folder)[:-keep]:
            # Renamed first: a crash half way leaves nothing that looks like a checkpoint.
            doomed = path.with_name(f".{path.name}.removed")
            os.rename(path, doomed)
            _remove(doomed)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot remove an old checkpoint: {error}") from error


def _checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints by rising step; one set aside counts where its successor is missing."""
    if not folder.is_dir():
        return []
    found = [
        (int(match[1]), match[2] is None, path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and _is_complete(path)
    ]
    by_step = {step: path for step, _, path in sorted(found)}
    return list(by_step.values())


def _is_complete(path: Path) -> bool:
    return (path / TRAINER_FILE).is_file()


def _set_aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.old")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_stale(folder: Path) -> None:
    """Removes what killed saves and prunes left in `folder`, and nothing that is worth loading."""
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        match = _NAME.fullmatch(path.name)
        replaced = match and match[2] and _is_complete(path.with_name(path.name[: -len(match[2])]))
        if replaced or _STALE.fullmatch(path.name):
            _remove(path)


def save_checkpoint(
    path: Path,
    state: Mapping[str, Tensor],
    *,
    version: int,
    extra: Mapping[str, Any],
    group: dist.ProcessGroup,
) -> None:
    """Collective over `group`: write `state` as a new folder, or not at all.

    `state` has DTensors, and plain tensors that are equal on all ranks. `version` and `extra` count
    on rank 0 only. An existing folder of that name is replaced.

    Raises:
        CheckpointError: on every rank, when any rank cannot write. Earlier checkpoints can be
            loaded as before, and the unfinished folder is removed, or named if it cannot be. Before
            anything is written: `extra` is no JSON data, or would come back as something else.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    is_first = dist.get_rank(group) == 0
    notes = together(group, lambda: _as_text(version, extra) if is_first else {}, path=path)

    def write_shards() -> None:
        save(dict(state), checkpoint_id=unfinished, process_group=group)

    try:
        together(group, lambda: _start_folder(unfinished) if is_first else None, path=path)
        together(group, write_shards, path=path)
        together(group, lambda: _finish(unfinished, path, notes) if is_first else None, path=path)
    except CheckpointError as error:
        text = f"{error}; earlier checkpoints are intact: free disk space or choose another folder"
        try:  # all ranks have stopped writing: whatever failed, it failed together
            together(group, lambda: _remove(unfinished) if is_first else None, path=unfinished)
        except CheckpointError as remains:
            raise CheckpointError(f"{text}; remove by hand what is left: {remains}") from error
        raise CheckpointError(text) from error


def load_checkpoint(
    path: Path, state: Mapping[str, Tensor], *, group: dist.ProcessGroup
) -> Restored:
    """Collective over `group`: fill `state` in place from a folder saved at any number of ranks.

    Raises:
        CheckpointError: on every rank. Before anything changes: no complete checkpoint there, one
            with missing, short or altered files, or keys that are extra, missing, or of another
            dtype or shape: the kinds of difference are all listed, with the first keys of each.
            Later: files of the right length that cannot be read; `state` may be half filled.
    """
    restored = together(group, lambda: _check_saved(path, state), path=path)
    together(group, lambda: _fill(path, state, group), path=path)
    return restored


def _as_text(version: int, extra: Mapping[str, Any]) -> dict[str, str]:
    """The content of the JSON files, in the order in which to write them."""
    content = dict(extra)
    driver = json.dumps(content, indent=2, allow_nan=False)
    if (back := json.loads(driver)) != content:
        raise CheckpointError(
            f"extra={content} would come back from JSON as {back}; use text as keys, lists "
            "instead of tuples"
        )
    trainer = {"version": version, _DRIVER_CRC: zlib.crc32(driver.encode())}
    return {DRIVER_FILE: driver, TRAINER_FILE: json.dumps(trainer, indent=2)}


def _start_folder(unfinished: Path) -> None:
    _remove_stale(unfinished.parent)
    _remove(unfinished)
    unfinished.mkdir(parents=True)


def _finish(unfinished: Path, path: Path, notes: Mapping[str, str]) -> None:
    for name, text in notes.items():
        with (unfinished / name).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    old = _set_aside(path)
    is_replaced = _is_complete(path)
    # Of `path` and `old` one at least is complete after each of these steps if one was before.
    _remove(old if is_replaced else path)
    if is_replaced:
        os.rename(path, old)
    try:
        os.rename(unfinished, path)
    except OSError:
        if is_replaced:
            os.rename(old, path)
        raise
    _remove(old)


def _check_saved(path: Path, state: Mapping[str, Tensor]) -> Restored:
    if not _is_complete(path):
        raise CheckpointError("no complete checkpoint there; give a step-NNNNNN folder of a run")
    try:
        saved, restored = _read_saved(path)
    except _DAMAGE as error:
        raise _damaged(path, error) from error
    faults = compare_keys(saved, state)
    if faults:
        raise CheckpointError("does not fit this trainer; " + "; ".join(faults))
    return restored


def _read_saved(path: Path) -> tuple[Mapping[str, Any], Restored]:
    """The tensors' metadata and the notes, and that the files are as long as these say.

    Raises:
        one of _DAMAGE.
    """
    metadata = FileSystemReader(path).read_metadata()
    sizes: dict[str, int] = {}
    for entry in metadata.storage_data.values():
        end = entry.offset + entry.length
        sizes[entry.relative_path] = max(end, sizes.get(entry.relative_path, 0))
    for name, size in sizes.items():
        if (found := (path / name).stat().st_size) < size:
            raise CheckpointError(f"{name} has {found} bytes of {size}")
    trainer = json.loads((path / TRAINER_FILE).read_text(encoding="utf-8"))
    if not isinstance(trainer, dict) or not isinstance(trainer.get("version"), int):
        raise CheckpointError(f"{TRAINER_FILE} has no version")
    driver = (path / DRIVER_FILE).read_text(encoding="utf-8")
    if zlib.crc32(driver.encode()) != trainer.get(_DRIVER_CRC):
        raise CheckpointError(f"{DRIVER_FILE} is not the one that was saved")
    restored = Restored(version=trainer["version"], extra=json.loads(driver))
    return metadata.state_dict_metadata, restored


def _fill(path: Path, state: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    try:
        load(dict(state), checkpoint_id=path, process_group=group)
    except CheckpointException as error:  # of any rank, and raised on all
        cause = next((cause for cause, _ in error.failures.values()), error)
        raise _damaged(path, cause) from error


def _damaged(path: Path, cause: BaseException) -> CheckpointError:
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
    checkpoints = _checkpoints(path.parent)
    return checkpoints[: checkpoints.index(path)] if path in checkpoints else []


def _is_intact(path: Path) -> bool:
    try:
        _read_saved(path)
    except _DAMAGE:
        return False
    return True


def compare_keys(saved: Mapping[str, Any], state: Mapping[str, Tensor]) -> list[str]:
    """Every kind of difference between saved metadata and live tensors, with the first keys of each
    and the setting that decides it.

    Torch itself passes over keys that are only saved, and casts dtypes, without a word.
    """
    missing = sorted(set(state) - set(saved))
    extra = sorted(set(saved) - set(state))
    both = {key: (saved[key], state[key]) for key in sorted(set(state) & set(saved))}
    odd = [key for key, (entry, _) in both.items() if not isinstance(entry, TensorStorageMetadata)]
    tensors = {
        key: (a.properties.dtype, a.size, b) for key, (a, b) in both.items() if key not in odd
    }
    dtypes = {key: (a, b.dtype) for key, (a, _, b) in tensors.items() if a != b.dtype}
    shapes = {key: (list(a), list(b.shape)) for key, (_, a, b) in tensors.items() if a != b.shape}
    faults = {
        "missing in the checkpoint": missing,
        "extra in the checkpoint": extra,
        "no tensor in the checkpoint": odd,
        "of another dtype": [f"{key} is {a} there but {b} here" for key, (a, b) in dtypes.items()],
        "of another shape": [f"{key} is {a} there but {b} here" for key, (a, b) in shapes.items()],
    }
    lines = [_first_of(what, items) for what, items in faults.items() if items]
    if dtypes:
        there = sorted({str(a).removeprefix("torch.") for a, _ in dtypes.values()})
        lines.append(f"set trainer.dtype to {' or '.join(there)}, as it was saved")
    if any(key.startswith("reference.") for key in missing):
        lines.append("it was saved without a reference policy: set grpo.kl-coef to 0")
    if any(key.startswith("reference.") for key in extra):
        lines.append("it was saved with a reference policy: set grpo.kl-coef above 0")
    return lines


def _first_of(what: str, items: list[str]) -> str:
    more = len(items) - _SHOWN_KEYS
    shown = ", ".join(items[:_SHOWN_KEYS]) + (f" and {more} more" if more > 0 else "")
    return f"{len(items)} {what}: {shown}"
