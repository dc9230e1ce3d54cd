"""The two JSON files of a checkpoint: what the trainer and the driver want back. Floor 3.

Called by `checkpoint.writing` and `checkpoint.metadata`. The trainer's file has the checksum of the
driver's, and comes last: where it is, the checkpoint is complete.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardloop.errors import CheckpointError

TRAINER_FILE = "trainer.json"
DRIVER_FILE = "driver.json"
_DRIVER_CRC = "driver_crc32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    version: int
    extra: dict[str, Any]
    """What the driver stored beside the tensors."""


def notes_as_text(version: int, extra: Mapping[str, Any]) -> dict[str, str]:
    """The content of the JSON files, in the order in which to write them.

    Raises:
        CheckpointError: `extra` would come back as something else. TypeError, ValueError: it is no
            JSON data.
    """
    content = dict(extra)
    driver = json.dumps(content, indent=2, allow_nan=False)
    if (back := json.loads(driver)) != content:
        raise CheckpointError(
            f"extra={content} would come back from JSON as {back}; use text as keys, lists "
            "instead of tuples"
        )
    trainer = {"version": version, _DRIVER_CRC: zlib.crc32(driver.encode())}
    return {DRIVER_FILE: driver, TRAINER_FILE: json.dumps(trainer, indent=2)}


def read_notes(path: Path) -> Restored:
    """
    Raises:
        CheckpointError: the files are not those that were saved. OSError, ValueError: they cannot
            be read.
    """
    trainer = json.loads((path / TRAINER_FILE).read_text(encoding="utf-8"))
    if not isinstance(trainer, dict) or not isinstance(trainer.get("version"), int):
        raise CheckpointError(f"{TRAINER_FILE} has no version")
    driver = (path / DRIVER_FILE).read_text(encoding="utf-8")
    if zlib.crc32(driver.encode()) != trainer.get(_DRIVER_CRC):
        raise CheckpointError(f"{DRIVER_FILE} is not the one that was saved")
    return Restored(version=trainer["version"], extra=json.loads(driver))
