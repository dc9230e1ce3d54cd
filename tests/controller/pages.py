"""What the page about metrics explains, against what a run wrote."""

import re
from pathlib import Path

from shardloop.controller.rundir import RunFolder
from shardloop.metrics import read_jsonl

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def unexplained(folder: RunFolder) -> set[str]:
    """Metrics of the run's two files, as file/name, that have no row in the page's table of it."""
    return {
        f"{path.name}/{name}"
        for path in (folder.metrics, folder.evals)
        for record in read_jsonl(path)
        for name in record.keys() - _explained(path.name)
    }


def _explained(file: str) -> set[str]:
    section = PAGE.read_text(encoding="utf-8").split(f"## {file}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, flags=re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
