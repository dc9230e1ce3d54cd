"""Metrics of a run: one JSON object a line, and small statistics for tables. Floor 0."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class JsonlWriter:
    """Appends one JSON object per line and flushes it, so that a crash loses no finished step."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(dict(record), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


@dataclass(slots=True)
class PhaseTimes:
    """Seconds spent in each named phase of a step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Interval:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson_interval(successes: float, trials: int, z: float = 1.96) -> Interval:
    """Interval of a proportion (Wilson 1927, score interval; z = 1.96 gives 95 %).

    Raises:
        ValueError: no trials, or successes outside [0, trials].
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"successes={successes} of trials={trials}; need 0 <= successes <= trials")
    p = successes / trials
    spread = 1 + z * z / trials
    centre = (p + z * z / (2 * trials)) / spread
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / spread
    return Interval(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))
