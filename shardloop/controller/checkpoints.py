"""The checkpoints of a run: when one is asked for, is complete, or has failed. Floor 4.

Called by `controller.stages`.

    save ──▶ the trainer copies ──▶ further steps ──▶ news: complete ──▶ Saved
                                         │
                                         └── the next save, or the run's end, waits for it
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardloop.checkpoint import SaveReport, checkpoint_name
from shardloop.config import CheckpointConfig
from shardloop.controller.events import Event, Saved
from shardloop.controller.groups import WorkerGroup
from shardloop.errors import RewardError, TaskError


class Checkpoints:
    """Has a trainer save, and follows what becomes of it.

    All methods but `seconds` raise CheckpointError where a checkpoint could not be written.
    """

    def __init__(self, trainer: WorkerGroup, folder: Path, config: CheckpointConfig) -> None:
        self._trainer = trainer
        self._folder = folder
        self._config = config
        self._is_pending = False
        self._seconds: dict[str, float] = {}

    def save(self, step: int) -> Iterator[Event]:
        """Asks for the checkpoint of `step`; one that is still being written is waited for."""
        yield from self.finish()
        self._trainer.call(
            "save",
            self._folder / checkpoint_name(step),
            extra={"step": step},
            keep=self._config.keep,
            background=self._config.background,
        )
        self._is_pending = True
        if not self._config.background:
            yield from self.finish()

    def news(self) -> Iterator[Event]:
        """Tells of a checkpoint that has been completed meanwhile; waits for nothing."""
        if self._is_pending and not any(self._trainer.call("is_saving")):
            yield from self.finish()

    def finish(self) -> Iterator[Event]:
        """Waits for the checkpoint that is still being written, if one is."""
        if not self._is_pending:
            return
        self._is_pending = False
        report: SaveReport = self._trainer.call("finish_save", collect="first")
        parts = {"stall": report.stall_s, "wait": report.wait_s, "write": report.write_s}
        self._seconds = {k: self._seconds.get(k, 0.0) + v for k, v in parts.items()}
        yield Saved("checkpoint", report.path)

    def seconds(self) -> dict[str, Any]:
        """A metric: the seconds of the checkpoints that were completed since it was last asked."""
        seconds, self._seconds = self._seconds, {}
        return {"checkpoint_seconds": seconds} if seconds else {}

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Around a run: one that ends by a fault of its task or reward, with its ranks well, first
        waits for its checkpoint."""
        try:
            yield
        except (RewardError, TaskError):
            for _ in self.finish():
                pass
            raise
