"""The folder of one run: what lies where, who may write there, what a resumed run keeps. Floor 4.

<out>/<name>/
  manifest.json       what the run is and how it was resumed (see `controller.manifest`)
  start/              the policy RL starts from (Hugging Face format)
  metrics.jsonl       one line per step
  evals.jsonl         one line per held-out evaluation
  checkpoints/        step-000050/ …, the newest few
  export/             the trained policy (Hugging Face format)
  report.md curve.png
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardloop.builtin import BUILTIN
from shardloop.config import TrainConfig
from shardloop.controller.manifest import read_config
from shardloop.errors import CheckpointError, UsageError
from shardloop.hf import WEIGHTS_FILE
from shardloop.metrics import read_jsonl, replace_text, writing

SEEDS_REPORT = "seeds-report.md"
"""Beside the folders of runs that `--seeds` made."""
LOCK = ".lock"


@dataclass(frozen=True, init=False)
class RunFolder:
    root: Path

    def __init__(self, root: str | Path) -> None:
        object.__setattr__(self, "root", Path(root))

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def start(self) -> Path:
        return self.root / "start"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def evals(self) -> Path:
        return self.root / "evals.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        return self.root / "export"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def curve(self) -> Path:
        return self.root / "curve.png"

    @property
    def report(self) -> Path:
        return self.root / "report.md"

    def read_config(self) -> TrainConfig:
        """The settings in force (see `controller.manifest`).

        Raises:
            UsageError: no manifest of a run there.
        """
        return read_config(self.manifest)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time works in the folder; the lock ends with its process.

        Raises:
            UsageError: another process has it. CheckpointError: the folder cannot be written.
        """
        with writing(self.root):
            lock = (self.root / LOCK).open("w", encoding="utf-8")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UsageError(
                    f"another process is running in {self.root}; wait for its end, or stop it"
                ) from error
            yield

    def demand_new(self) -> None:
        """Makes the folder where there is none.

        Raises:
            UsageError: something lies in it. CheckpointError: it cannot be made.
        """
        with writing(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            found = sorted(path.name for path in self.root.iterdir() if path.name != LOCK)
        if found:
            raise UsageError(
                f"{self.root} is not empty ({', '.join(found[:3])}): choose a new folder, or go on "
                "with the run in it by resume"
            )

    @contextmanager
    def removed_if_barren(self) -> Iterator[None]:
        """A new run that fails before it has a start or a step to go on from leaves no folder."""
        done = False
        try:
            yield
            done = True
        finally:
            if not (done or self.has_progress()):
                self._remove()

    def has_progress(self) -> bool:
        """Whether resuming this run would save work."""
        return self.has_start() or bool(self.metrics.exists() and self.metrics.stat().st_size)

    def has_start(self) -> bool:
        """Whether the start is whole: the weights of a model folder are written last."""
        return (self.start / WEIGHTS_FILE).is_file()

    def _remove(self) -> None:
        """Takes away what a run writes; what else lies in the folder stays, and so does it."""
        ours = (self.manifest, self.start, self.evals, self.checkpoints, self.tensorboard)
        for path in (*ours, *(self.root / name for name in (*BUILTIN, LOCK))):
            with suppress(FileNotFoundError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        with suppress(OSError):
            self.root.rmdir()

    def forget_after(self, step: int) -> None:
        """Drops metrics and evaluations of steps after `step`, which a resumed run makes again,
        and the rest of a line that a crash cut off.

        Raises:
            CheckpointError: the files cannot be written, or are damaged.
        """
        for path in (self.metrics, self.evals):
            records = read_jsonl(path)
            lost = [record for record in records if not isinstance(record.get("step"), int)]
            if lost:
                raise CheckpointError(f"{path} is damaged: {lost[0]} has no step; delete that line")
            lines = [json.dumps(record) + "\n" for record in records if record["step"] <= step]
            kept = "".join(lines)
            if path.exists() and path.read_bytes() != kept.encode():
                replace_text(path, kept)


def planned_run_folder(config: TrainConfig, *, label: str) -> Path:
    """`out/name`; without a name `out/<label>-seed<seed>`, numbered from 2 where that exists.

    Raises:
        UsageError: the named folder exists already, or the name is no name of a folder.
    """
    if config.name is None:
        stem = f"{label}-seed{config.seed}"
        names = (stem, *(f"{stem}-{n}" for n in range(2, 10_000)))
    else:
        names = (config.name,)
    for root in (config.out / name for name in names):
        if not os.path.lexists(root):
            return root
    raise UsageError(
        f"{config.out / names[0]} exists; choose another --name, or go on with it by --resume"
    )


def create_run_folder(config: TrainConfig, *, label: str) -> RunFolder:
    """A new folder, named as `planned_run_folder` says.

    Raises:
        UsageError: as there, or the folder cannot be made.
    """
    while True:
        root = planned_run_folder(config, label=label)
        try:
            root.mkdir(parents=True)
        except FileExistsError:
            continue  # another run has just taken it
        except OSError as error:
            raise UsageError(f"cannot make the run's folder {root}: {error}") from error
        else:
            return RunFolder(root)


def open_run_folder(root: Path) -> RunFolder:
    """The folder of an earlier run.

    Raises:
        UsageError: there is no manifest in it.
    """
    folder = RunFolder(root)
    if not folder.manifest.is_file():
        raise UsageError(f"{root}: no manifest.json there; give the folder of a run")
    return folder
