"""Files of other people's making: what is wrong with one becomes a ModelError. Floor 2.

Called by everything in `hf` that reads.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardloop.errors import ModelError, ShardloopError
from shardloop.types import shorten

LONGEST_REASON = 300


@contextmanager
def as_model_error(what: str) -> Iterator[None]:
    """Whatever transformers, tokenizers, safetensors or a template raise is a ModelError `what`.

    Their exceptions have no common base: some are bare Exceptions, and a panic in their native code
    is not even that.
    """
    try:
        yield
    except (ShardloopError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        reason = shorten(" ".join(str(error).split()), LONGEST_REASON)
        raise ModelError(f"{what}: {type(error).__name__}: {reason}") from error


def demand_model_folder(model_dir: Path) -> None:
    """
    Raises:
        ModelError: there is no such folder, or it is that of a run.
    """
    if not model_dir.is_dir():
        raise ModelError(
            f"model={str(model_dir)!r}: no such folder; give one with config.json and *.safetensors"
        )
    if (model_dir / "manifest.json").is_file() and not (model_dir / "config.json").is_file():
        raise ModelError(
            f"model={str(model_dir)!r} is the folder of a run; the model that it trained is in "
            f"{model_dir / 'export'} once the run has ended"
        )


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file.

    Raises:
        ModelError: the file holds something else, or cannot be read.
    """
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON ({error}); restore the file") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); allow reading it") from error
    if not isinstance(content, dict):
        raise ModelError(
            f"{path}: holds {type(content).__name__}, not a JSON object; restore the file"
        )
    return content
