"""Models that come with the library, by name; any other name is a folder.

Called by runs, by `controller.sft` and by the command line. Floor 2.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from shardloop.smollm2 import fetch_smollm2
from shardloop.tiny import build_tiny


class _Maker(Protocol):
    def __call__(self, folder: Path, *, seed: int, say: Callable[[str], None]) -> Path: ...


def _tiny(folder: Path, *, seed: int, say: Callable[[str], None]) -> Path:
    return build_tiny(folder / "tiny", seed=seed)


def _smollm2(folder: Path, *, seed: int, say: Callable[[str], None]) -> Path:
    return fetch_smollm2(say=say)


BUILTIN: Mapping[str, _Maker] = {"tiny": _tiny, "smollm2": _smollm2}


def model_folder(model: str, folder: Path, *, seed: int, say: Callable[[str], None]) -> Path:
    """The Hugging Face folder of `model`; a built-in one is made in `folder` or fetched first.

    Raises:
        OSError: `folder` cannot be written. DownloadError: see `fetch_smollm2`.
    """
    make = BUILTIN.get(model)
    return Path(model) if make is None else make(folder, seed=seed, say=say)


@contextmanager
def temporary_model_folder(
    model: str, *, seed: int, say: Callable[[str], None] = print
) -> Iterator[Path]:
    """As `model_folder`; what is made of it is gone when the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        yield model_folder(model, Path(folder), seed=seed, say=say)
