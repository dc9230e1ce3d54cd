"""The checkpoints of a run: when one is asked for, is complete, or has failed. Floor 4.

Called by `controller.stages`.

    save ──▶ the trainer copies ──▶ further steps ──▶ news: complete ──▶ Saved
                                         │
                                         └── the next save, or the run's end, waits for it

A run that ends by an error says what became of the checkpoint that was being written, behind the
error itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardloop.checkpoint import SaveReport, checkpoint_name
from shardloop.checkpoint.folder import is_complete
from shardloop.config import CheckpointConfig
from shardloop.controller.events import Event, Saved
from shardloop.controller.groups import WorkerGroup
from shardloop.errors import CheckpointError, ShardloopError


class Checkpoints:
    """Has a trainer save, and follows what becomes of it.

    All methods but `seconds` raise CheckpointError where a checkpoint could not be written.
    """

    def __init__(self, trainer: WorkerGroup, folder: Path, config: CheckpointConfig) -> None:
        self._trainer = trainer
        self._folder = folder
        self._config = config
        self._pending: Path | None = None
        self._seconds: dict[str, float] = {}

    def save(self, step: int) -> Iterator[Event]:
        """Asks for the checkpoint of `step`; one that is still being written is waited for."""
        yield from self.finish()
        path = self._folder / checkpoint_name(step)
        self._trainer.call(
            "save",
            path,
            extra={"step": step},
            keep=self._config.keep,
            background=self._config.background,
        )
        self._pending = path
        if not self._config.background:
            yield from self.finish()

    def news(self) -> Iterator[Event]:
        """Tells of a checkpoint that has been completed meanwhile; waits for nothing."""
        if self._pending and not any(self._trainer.call("is_saving")):
            yield from self.finish()

    def finish(self) -> Iterator[Event]:
        """Waits for the checkpoint that is still being written, if one is."""
        if self._pending is None:
            return
        try:
            report: SaveReport = self._trainer.call("finish_save", collect="first")
        except CheckpointError:
            self._pending = None  # that is told of
            raise
        self._pending = None
        parts = {"stall": report.stall_s, "wait": report.wait_s, "write": report.write_s}
        self._seconds = {k: self._seconds.get(k, 0.0) + v for k, v in parts.items()}
        yield Saved("checkpoint", report.path)

    def seconds(self) -> dict[str, Any]:
        """A metric: the seconds of the checkpoints that were completed since it was last asked."""
        seconds, self._seconds = self._seconds, {}
        return {"checkpoint_seconds": seconds} if seconds else {}

    @contextmanager
    def completed(self) -> Iterator[None]:
        """Around a run: an error that leaves the ranks well first waits for the checkpoint that is
        being written. One that is lost, or cannot be written either, is told of in the error."""
        try:
            yield
        except Exception as error:
            if loss := self._loss():
                _add(error, loss)
            raise

    def _loss(self) -> str | None:
        """Why there will be no checkpoint of the last `save`; None where it is there."""
        path, self._pending = self._pending, None
        if path is None:
            return None
        if not self._trainer.alive():
            lost = f"{path} was not complete yet and is lost with its ranks"
            return None if is_complete(path) else lost
        try:
            self._trainer.call("finish_save")
        except ShardloopError as error:
            return f"{error}"
        return None


def _add(error: Exception, text: str) -> None:
    """It stays the same object, with its traceback and the notes of other processes."""
    if isinstance(error, ShardloopError):
        error.args = (f"{error}\nand besides: {text}",)
    else:
        error.add_note(text)
