"""Sharded checkpoints: written whole or not at all, readable at any number of ranks. Floor 3.

Called by the trainer (save, load) and by the run (latest, prune). One checkpoint is a folder:

    step-000050/
      .metadata, __0_0.distcp …   tensors, each rank its own shards (torch.distributed.checkpoint)
      trainer.json                version of the weights
      driver.json                 whatever the driver wants back

    .step-000050.unfinished/ ──all ranks wrote──▶ json ──▶ rename ──▶ step-000050/
                │
                └── any rank failed: removed, CheckpointError on every rank, older folders untouched

The metadata is a pickle: load only checkpoints that you trust.
"""

import json
import os
import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardloop.errors import CheckpointError
from shardloop.parallel.agree import together

TRAINER_FILE = "trainer.json"
DRIVER_FILE = "driver.json"
_NAME = re.compile(r"step-(\d{6,})")


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
    """Removes all but the `keep` (1 or more) newest checkpoints. One process calls.

    Raises:
        CheckpointError: one cannot be removed.
    """
    for path in _checkpoints(folder)[:-keep]:
        doomed = path.with_name(f".{path.name}.removed")
        try:
            # Renamed first: a crash half way leaves nothing that looks like a checkpoint.
            os.rename(path, doomed)
            shutil.rmtree(doomed)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot remove this old checkpoint: {error}") from error


def _checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints by rising step."""
    if not folder.is_dir():
        return []
    steps = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and (path / TRAINER_FILE).is_file()
    }
    return [steps[step] for step in sorted(steps)]


def save_checkpoint(
    path: Path,
    state: Mapping[str, Tensor],
    *,
    version: int,
    extra: Mapping[str, Any],
    group: dist.ProcessGroup,
) -> None:
    """Collective over `group`: write `state` as a new folder, or not at all.

    `state` has DTensors, and plain tensors that are equal on all ranks. `version` and `extra` (JSON
    data) count on rank 0 only. An existing folder of that name is replaced.

    Raises:
        CheckpointError: on every rank, when any rank cannot write; the unfinished folder is removed
            and earlier checkpoints are as they were.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    is_first = dist.get_rank(group) == 0
    notes = {TRAINER_FILE: {"version": version}, DRIVER_FILE: dict(extra)}

    def write_shards() -> None:
        save(dict(state), checkpoint_id=unfinished, process_group=group)

    try:
        together(group, lambda: _start_folder(unfinished) if is_first else None, path=path)
        together(group, write_shards, path=path)
        together(group, lambda: _finish(unfinished, path, notes) if is_first else None, path=path)
    except CheckpointError as error:
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier(group)
        raise CheckpointError(
            f"{error}; earlier checkpoints are intact: free disk space or choose another folder"
        ) from error


def load_checkpoint(
    path: Path, state: Mapping[str, Tensor], *, group: dist.ProcessGroup
) -> Restored:
    """Collective over `group`: fill `state` in place from a folder saved at any number of ranks.

    Raises:
        CheckpointError: on every rank. Before anything changes: no complete checkpoint there, or
            keys that are extra, missing, or of another dtype or shape, all of them listed. Later:
            files that cannot be read, after which `state` may be half filled.
    """
    restored = together(group, lambda: _check_saved(path, state), path=path)
    together(
        group,
        lambda: load(dict(state), checkpoint_id=path, process_group=group),
        path=path,
    )
    return restored


def _start_folder(unfinished: Path) -> None:
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)


def _finish(unfinished: Path, path: Path, notes: Mapping[str, Any]) -> None:
    for name, content in notes.items():
        with (unfinished / name).open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=2, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
    replaced = path.with_name(f".{path.name}.removed")
    if path.exists():
        os.rename(path, replaced)
    os.rename(unfinished, path)
    shutil.rmtree(replaced, ignore_errors=True)


def _check_saved(path: Path, state: Mapping[str, Tensor]) -> Restored:
    if not (path / TRAINER_FILE).is_file():
        raise CheckpointError("no complete checkpoint there; give a step-NNNNNN folder of a run")
    try:
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        version = json.loads((path / TRAINER_FILE).read_text(encoding="utf-8"))["version"]
        extra = json.loads((path / DRIVER_FILE).read_text(encoding="utf-8"))
    except (ValueError, KeyError, EOFError, AttributeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"damaged ({type(error).__name__}: {error})") from error
    faults = compare_keys(saved, state)
    if faults:
        raise CheckpointError("does not fit this trainer; " + "; ".join(faults))
    return Restored(version=version, extra=extra)


def compare_keys(saved: Mapping[str, Any], state: Mapping[str, Tensor]) -> list[str]:
    """Every way in which saved metadata differs from live tensors.

    Torch itself passes over keys that are only saved, and casts dtypes, without a word.
    """
    missing = sorted(set(state) - set(saved))
    extra = sorted(set(saved) - set(state))
    faults = [f"missing in the checkpoint: {', '.join(missing)}"] if missing else []
    faults += [f"extra in the checkpoint: {', '.join(extra)}"] if extra else []
    for key in sorted(set(state) & set(saved)):
        entry, live = saved[key], state[key]
        if not isinstance(entry, TensorStorageMetadata):
            faults.append(f"{key} is no tensor in the checkpoint")
            continue
        if entry.properties.dtype != live.dtype:
            faults.append(f"{key} is {entry.properties.dtype} there but {live.dtype} here")
        if tuple(entry.size) != tuple(live.shape):
            faults.append(f"{key} is {list(entry.size)} there but {list(live.shape)} here")
    return faults
