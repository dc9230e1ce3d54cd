"""What a run tells while it goes on: data, so that a terminal, a notebook or a test can follow it.

Floor 4. `controller.run` yields these; `cli.view` shows them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the person who waits."""

    text: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Step `step` of `total` of a named stage is done, with its metrics."""

    stage: str
    step: int
    total: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Held-out measurement after `step` optimizer batches; `metrics` as written to evals.jsonl."""

    step: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Saved:
    """Something of use was written."""

    what: str
    path: Path


Event = Note | Progress | Evaluated | Saved
