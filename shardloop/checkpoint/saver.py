"""One trainer's saves, one after the other, on request while training goes on. Floor 3.

Built by the trainer on each rank.

    training ──▶ wait for the save before ─▶ copy ─▶ agree ─┬─▶ training ───────▶ finish ─▶ …
                                                            │                       ▲
    thread                                                  └─▶ write_checkpoint ───┘
                                                                report or error

The thread of each rank talks to those of the others over a group of its own, so that its messages
and those of the training never meet, in whatever order the two run. The copies lie in memory that
is used again: the next save begins when this one is done.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardloop.checkpoint.notes import notes_as_text
from shardloop.checkpoint.staging import Staging
from shardloop.checkpoint.writing import save_checkpoint, write_checkpoint
from shardloop.parallel.agree import named_error, together
from shardloop.parallel.mesh import twin_group


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """Of one checkpoint that is complete; seconds of this rank."""

    path: Path
    stall_s: float
    """In which `save` held the caller up, the wait for the save before left out."""
    wait_s: float
    """In which the caller then waited for its end."""
    write_s: float
    """From the first file to the folder's name, all ranks together."""


@dataclass(frozen=True, kw_only=True)
class _Save:
    path: Path
    stall_s: float
    written: "Future[float]"
    """The seconds that it took."""


class Saver:
    """Saves one checkpoint at a time. All methods but `is_writing` are collective over `group`."""

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        """
        Args:
            timeout_s: how long the thread of a rank waits for those of the others.
        """
        self._group = group
        self._timeout_s = timeout_s
        self._staging = Staging()
        self._threads_group: dist.ProcessGroup | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: _Save | None = None

    def save(
        self,
        path: Path,
        state: Mapping[str, Tensor],
        *,
        version: int,
        extra: Mapping[str, Any],
        keep: int | None,
        background: bool,
    ) -> None:
        """Saves as `save_checkpoint`; with `background` it returns when `state` has been copied.

        Every save has the same keys, shapes and dtypes. An earlier one is waited for. The first in
        the background makes the memory for the copies.

        Raises:
            CheckpointError: on every rank: as `save_checkpoint`; or the save before has failed, and
                nobody has asked for it by `finish`. WorkerDied, WorkerTimeout: as `finish`.
        """
        self.finish()
        began = time.perf_counter()
        if not background:
            save_checkpoint(path, state, version=version, extra=extra, group=self._group, keep=keep)
            written: Future[float] = Future()
            written.set_result(time.perf_counter() - began)
        else:
            written = self._start(path, state, version=version, extra=extra, keep=keep)
        self._last = _Save(path=path, stall_s=time.perf_counter() - began, written=written)

    def _start(
        self,
        path: Path,
        state: Mapping[str, Tensor],
        *,
        version: int,
        extra: Mapping[str, Any],
        keep: int | None,
    ) -> "Future[float]":
        if self._threads_group is None:
            self._threads_group = twin_group(self._group, timeout_s=self._timeout_s)
        group = self._threads_group

        def copy() -> tuple[dict[str, str], dict[str, Tensor]]:
            is_first = dist.get_rank(group) == 0
            return notes_as_text(version, extra) if is_first else {}, self._staging.fill(state)

        notes, parts = together(self._group, copy, path=path)

        def write() -> float:
            began = time.perf_counter()
            write_checkpoint(path, state, parts=parts, notes=notes, group=group, keep=keep)
            return time.perf_counter() - began

        return self._thread.submit(write)

    def is_writing(self) -> bool:
        """Whether this rank's thread is still at work."""
        return self._last is not None and not self._last.written.done()

    def finish(self) -> SaveReport | None:
        """Waits for the last save; None if there was none since the last call.

        Raises:
            CheckpointError: on every rank, when any could not write it; said once.
            WorkerDied, WorkerTimeout: the thread of another rank did not answer.
        """
        save, self._last = self._last, None
        if save is None:
            return None
        began = time.perf_counter()
        try:
            write_s = save.written.result()
        except RuntimeError as error:
            raise named_error(error, f"saving {save.path}", self._timeout_s) from error
        return SaveReport(
            path=save.path,
            stall_s=save.stall_s,
            wait_s=time.perf_counter() - began,
            write_s=write_s,
        )
