"""Writes a checkpoint on all ranks: whole, or not at all. Floor 3.

Called by `checkpoint.saver`.

    unfinished folder ──▶ shards ──all ranks wrote──▶ notes ──on the disk──▶ name ──▶ retention
            │                │                          │
            └────────────────┴── any rank failed: all ◀─┘
                                 have stopped, removed, CheckpointError on every rank
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shardloop.checkpoint.folder import (
    prune_checkpoints,
    publish,
    remove,
    remove_stale,
    sync_to_disk,
    unfinished_name,
)
from shardloop.checkpoint.notes import notes_as_text
from shardloop.checkpoint.staging import PlanOfAnother
from shardloop.errors import CheckpointError
from shardloop.parallel.agree import together
from shardloop.parallel.fsdp import local_tensor


def save_checkpoint(
    path: Path,
    state: Mapping[str, Tensor],
    *,
    version: int,
    extra: Mapping[str, Any],
    group: dist.ProcessGroup,
    keep: int | None = None,
) -> None:
    """Collective over `group`: write `state` as a new folder, or not at all.

    `state` has DTensors, and plain tensors that are equal on all ranks. `version` and `extra` count
    on rank 0 only. An existing folder of that name is replaced. Of the checkpoints beside it only
    the `keep` newest stay; None: all.

    Raises:
        CheckpointError: on every rank, when any rank cannot write. Earlier checkpoints can be
            loaded as before, and the unfinished folder is removed, or named if it cannot be. Before
            anything is written: `extra` is no JSON data, or would come back as something else.
    """
    is_first = dist.get_rank(group) == 0
    notes = together(group, lambda: notes_as_text(version, extra) if is_first else {}, path=path)
    parts = {key: local_tensor(value) for key, value in state.items()}
    write_checkpoint(path, state, parts=parts, notes=notes, group=group, keep=keep)


def write_checkpoint(
    path: Path,
    state: Mapping[str, Tensor],
    *,
    parts: Mapping[str, Tensor],
    notes: Mapping[str, str],
    group: dist.ProcessGroup,
    keep: int | None,
) -> None:
    """Collective over `group`: as `save_checkpoint`, of elements that may be copies.

    Args:
        state: names, shapes and cuts; the elements are not read.
        parts: the elements: this rank's part of each tensor.
        notes: the JSON files as text; they count on rank 0 only.
    """
    unfinished = unfinished_name(path)
    is_first = dist.get_rank(group) == 0

    def start() -> None:
        if is_first:
            start_folder(unfinished)

    def finish() -> None:
        if is_first:
            finish_folder(unfinished, path, notes)
            if keep is not None:
                prune_checkpoints(path.parent, keep=keep)

    try:
        together(group, start, path=path)
        together(group, lambda: write_shards(unfinished, state, parts, group), path=path)
        together(group, finish, path=path)
    except CheckpointError as error:
        text = f"{error}; earlier checkpoints are intact: free disk space or choose another folder"
        try:  # all ranks have stopped writing: whatever failed, it failed together
            together(group, lambda: remove(unfinished) if is_first else None, path=unfinished)
        except CheckpointError as remains:
            raise CheckpointError(f"{text}; remove by hand what is left: {remains}") from error
        raise CheckpointError(text) from error


def start_folder(unfinished: Path) -> None:
    remove_stale(unfinished.parent)
    remove(unfinished)
    unfinished.mkdir(parents=True)


def write_shards(
    unfinished: Path,
    state: Mapping[str, Tensor],
    parts: Mapping[str, Tensor],
    group: dist.ProcessGroup,
) -> None:
    """Collective over `group`: each rank its own files, which are on its disk at the return."""
    # Torch would sync a file before its last buffered bytes are written to it.
    writer = FileSystemWriter(unfinished, sync_files=False)
    save(dict(state), storage_writer=writer, planner=PlanOfAnother(parts), process_group=group)
    for file in unfinished.glob(f"__{dist.get_rank(group)}_*"):
        sync_to_disk(file)


def finish_folder(unfinished: Path, path: Path, notes: Mapping[str, str]) -> None:
    sync_to_disk(unfinished / ".metadata")
    for name, text in notes.items():
        with (unfinished / name).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    sync_to_disk(unfinished)
    publish(unfinished, path)
