"""`shardloop report`: finished runs as one table, with intervals over their seeds. Floor 5."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from shardloop.controller.report import seeds_report


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Compare finished runs: before and after of each, and the mean over them."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs."""


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(ReportCommand, prog="shardloop report", args=list(arguments))
    print(seeds_report(list(command.runs)))
    return 0
