"""What a run is, in its manifest.json, and what may change when it is resumed. Floor 4.

The manifest is written once, when the run begins. Each resumption adds an entry to its list
`resumed`; the settings in force are the first ones with all of these changes.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import shardloop
from shardloop.config import TrainConfig, from_dict, to_dict
from shardloop.errors import UsageError
from shardloop.metrics import replace_text

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
CHANGEABLE = (
    *("steps", "track", "eval.every"),
    *("checkpoint.every", "checkpoint.keep", "checkpoint.background"),
    *("trainer.layout", "trainer.row_tokens", "trainer.rows_per_micro_batch"),
    *("trainer.sequence_parallel", "trainer.activation_checkpointing"),
    *("engine.layout", "engine.max_slots", "engine.sleep", "engine.transport"),
    *("workers.device", "workers.threads", "workers.timeout_s", "workers.colocate"),
)
"""Settings that a resumed run may change: how long and where it runs, not what it learns from."""

Changes = Mapping[str, Any]
"""Dotted name of a setting -> its new value, as JSON data."""


def write_manifest(path: Path, config: TrainConfig, facts: Mapping[str, Any]) -> None:
    """Writes config, versions and `facts` (JSON data) of a run that begins.

    Raises:
        CheckpointError: it cannot be written.
    """
    record = {
        "shardloop": shardloop.__version__,
        **_occasion(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "config": to_dict(config),
        **facts,
        "resumed": [],
    }
    _write(path, record)


def add_resumption(path: Path, changes: Changes, *, from_step: int) -> None:
    """Notes in the manifest that the run goes on from `from_step` with other settings.

    Raises:
        UsageError: it is no manifest. CheckpointError: it cannot be written.
    """
    record = read_manifest(path)
    entry = {**_occasion(), "changes": dict(changes), "from_step": from_step}
    _write(path, {**record, "resumed": [*record.get("resumed", []), entry]})


def read_manifest(path: Path) -> dict[str, Any]:
    """
    Raises:
        UsageError: it cannot be read, or is no manifest of a run.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a run's manifest: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
        raise UsageError(f"{path} is not a run's manifest: it has no config")
    return record


def read_config(path: Path) -> TrainConfig:
    """The settings in force: those that the run began with, and what resumptions changed.

    Raises:
        UsageError: as `read_manifest`, or settings that this release does not have.
    """
    record = read_manifest(path)
    config = record["config"]
    try:
        for entry in record.get("resumed", []):
            for name, value in entry["changes"].items():
                *outer, last = name.split(".")
                section = config
                for key in outer:
                    section = section[key]
                section[last] = value
        return from_dict(TrainConfig, config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a run's manifest: {error}") from error


def changed_settings(before: TrainConfig, after: TrainConfig) -> Changes:
    """What a resumed run changes.

    Raises:
        UsageError: a setting that makes it another run; names all of them.
    """
    old, new = flat_settings(before), flat_settings(after)
    changes = {name: value for name, value in new.items() if value != old[name]}
    fixed = [name for name in changes if name not in CHANGEABLE]
    if fixed:
        told = ", ".join(
            f"{name.replace('_', '-')}={new[name]} (the run has {old[name]})" for name in fixed
        )
        raise UsageError(
            f"a resumed run keeps what it is; it cannot have {told}: leave that out, or start a "
            "new run without --resume"
        )
    return changes


def flat_settings(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every setting by its dotted name, as JSON data."""
    settings: dict[str, Any] = {}
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            settings |= flat_settings(value, f"{prefix}{entry.name}.")
        else:
            settings[prefix + entry.name] = str(value) if isinstance(value, Path) else value
    return settings


def _write(path: Path, record: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(record, indent=2) + "\n")


def _occasion() -> dict[str, Any]:
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Commit of the checkout the package runs from; None for an installed package."""
    here = Path(shardloop.__file__).parent
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
