"""What a run records: one JSON object a line, and the seconds of each phase.

Called by the loop, the run and the report. Floor 0.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardloop.errors import CheckpointError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around everything that writes `path`, a file or folder of a run.

    Raises:
        CheckpointError: an OSError was raised inside; names the path.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write {path}: {error}; make room for it, or choose another folder"
        ) from error


def append_jsonl(path: Path, record: Mapping[str, Any]) -> None:
    """Appends one line and closes the file, so that a crash loses no finished step.

    Raises:
        CheckpointError: as `writing`. ValueError: a number that is not finite.
    """
    line = json.dumps(dict(record), allow_nan=False) + "\n"
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(line)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The records of a file in order; none where there is no file.

    A last line that a crash cut off is passed over: its step was never finished.

    Raises:
        CheckpointError: any other line is no JSON object, or the file cannot be read.
    """
    try:
        *lines, tail = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    records = [_record(line, f"{path}:{number}") for number, line in numbered]
    with suppress(CheckpointError):
        records += [_record(tail, str(path))] if tail else []
    return records


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{place} is damaged: {error}; mend or delete that line") from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{place} is damaged: no JSON object; mend or delete that line")
    return record


def replace_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all: a crash leaves the old one.

    Raises:
        CheckpointError: as `writing`.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


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
