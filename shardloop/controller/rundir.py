"""The folder of one run: what lies where, its manifest, what a resumed run takes up. Floor 4.

<out>/<name>/
  manifest.json       config, versions, seed, commit, plan: enough to repeat the run
  start/              the policy RL starts from (Hugging Face format)
  metrics.jsonl       one line per step
  evals.jsonl         one line per held-out evaluation
  checkpoints/        step-000050/ …, the newest few
  export/             the trained policy (Hugging Face format)
  report.md curve.png
"""

import json
import platform
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import shardloop
from shardloop.config import TrainConfig, from_dict, to_dict
from shardloop.errors import UsageError
from shardloop.metrics import read_jsonl, writing

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")


@dataclass(frozen=True, slots=True)
class RunFolder:
    root: Path

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

    def write_manifest(self, config: TrainConfig, facts: dict[str, Any]) -> None:
        """Writes config, versions and `facts` (JSON data); a resumed run writes it anew.

        Raises:
            CheckpointError: it cannot be written.
        """
        record = {
            "shardloop": shardloop.__version__,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "commit": _commit(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: metadata.version(name) for name in PACKAGES},
            "config": to_dict(config),
            **facts,
        }
        text = json.dumps(record, indent=2) + "\n"
        with writing(self.manifest):
            self.manifest.write_text(text, encoding="utf-8")

    def read_config(self) -> TrainConfig:
        try:
            record = json.loads(self.manifest.read_text(encoding="utf-8"))
            return from_dict(TrainConfig, record["config"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{self.manifest} is not a run's manifest: {error}") from error

    def forget_after(self, step: int) -> None:
        """Drops metrics and evaluations of steps after `step`, which a resumed run makes again.

        Raises:
            CheckpointError: the files cannot be written.
        """
        for path in (self.metrics, self.evals):
            records = read_jsonl(path)
            kept = [record for record in records if record["step"] <= step]
            if len(kept) < len(records):
                temporary = path.with_suffix(".tmp")
                with writing(path):
                    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept))
                    temporary.replace(path)


def create_run_folder(config: TrainConfig, *, label: str) -> RunFolder:
    """A new folder `out/name`; without a name, `out/<label>-seed<seed>`, numbered if it exists.

    Raises:
        UsageError: the named folder exists already, or cannot be made.
    """
    if config.name is not None:
        candidates = [config.out / config.name]
    else:
        stem = f"{label}-seed{config.seed}"
        candidates = [config.out / stem, *(config.out / f"{stem}-{n}" for n in range(2, 10_000))]
    for root in candidates:
        try:
            root.mkdir(parents=True)
            return RunFolder(root)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"cannot make the run's folder {root}: {error}") from error
    raise UsageError(f"{candidates[0]} exists; choose another --name, or go on with it by --resume")


def open_run_folder(root: Path) -> RunFolder:
    """The folder of an earlier run.

    Raises:
        UsageError: there is no manifest in it.
    """
    folder = RunFolder(root)
    if not folder.manifest.is_file():
        raise UsageError(f"--resume {root}: no manifest.json there; give the folder of a run")
    return folder


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
