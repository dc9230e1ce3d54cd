"""Metrics for a dashboard, besides the run's own files. Called by `controller.run`. Floor 4."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from shardloop.config import Tracker
from shardloop.errors import UsageError, how_to_install
from shardloop.metrics import writing


class MetricSink(Protocol):
    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes the numbers of one step; nested mappings are named `outer/inner`."""
        ...

    def close(self) -> None: ...


class NoSink:
    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoardSink:
    """Event files that `tensorboard --logdir` shows."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError(
                f"track=tensorboard needs an extra: {how_to_install('track')}"
            ) from error
        self._folder = folder
        with writing(folder):
            self._writer = SummaryWriter(str(folder))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        with writing(self._folder):
            for name, value in flat(metrics).items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with writing(self._folder):
            self._writer.close()


def open_sink(tracker: Tracker, folder: Path) -> MetricSink:
    """
    Raises:
        UsageError: the tracker's package is not installed.
    """
    return TensorBoardSink(folder) if tracker == "tensorboard" else NoSink()


def flat(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers by name; a mapping within becomes `outer/inner`."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            numbers |= flat(value, f"{prefix}{name}/")
        else:
            numbers[prefix + name] = float(value)
    return numbers
