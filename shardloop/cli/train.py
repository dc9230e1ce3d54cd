"""`shardloop train`: a GRPO run, a check of its settings, or the rest of a run. Floor 5."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from shardloop.cli.interrupt import InterruptFlag
from shardloop.cli.view import View, set_up_logging
from shardloop.config import TrainConfig
from shardloop.controller.report import seeds_report
from shardloop.controller.run import check, train
from shardloop.controller.rundir import RunFolder, create_run_folder, open_run_folder
from shardloop.errors import UsageError
from shardloop.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Improve a language model by GRPO, with sharded training and a tensor-parallel engine."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: Literal["tiny", "smollm2"] | None = None
    """Vetted settings to start from; every flag below changes one of them. [default: tiny, or none
    with --model]"""
    resume: Path | None = None
    """Folder of an earlier run to go on with from its newest checkpoint."""
    check: bool = False
    """Print the resolved plan and stop before anything runs."""
    seeds: int = 1
    """Runs with consecutive seeds, one after the other, and a report over all of them."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """Print results only."""
    verbose: Annotated[bool, tyro.conf.arg(aliases=["-v"])] = False
    """Print what workers do."""


def run(arguments: Sequence[str]) -> int:
    start, label = starting_config(arguments)
    command = tyro.cli(
        TrainCommand,
        prog="shardloop train",
        args=list(arguments),
        default=TrainCommand(config=start),
    )
    set_up_logging(verbose=command.verbose)
    if command.seeds < 1:
        raise UsageError(f"seeds={command.seeds}; choose 1 or more")
    if command.resume is not None and command.seeds > 1:
        raise UsageError("--resume goes on with one run; leave --seeds out")
    if command.check:
        print(check(command.config))
        return 0
    folders = [
        run_one(dataclasses.replace(command.config, seed=seed), label=label, command=command)
        for seed in range(command.config.seed, command.config.seed + command.seeds)
    ]
    if len(folders) > 1:
        print(seeds_report([folder.root for folder in folders]))
    return 0


def run_one(config: TrainConfig, *, label: str, command: TrainCommand) -> RunFolder:
    resumed = command.resume is not None
    if command.resume is not None:
        folder = open_run_folder(command.resume)
    else:
        folder = create_run_folder(config, label=label)
    with View(quiet=command.quiet) as view, InterruptFlag() as flag:
        for event in train(config, folder, resume=resumed, stop_requested=flag.is_set):
            view.show(event)
    print(folder.report.read_text(encoding="utf-8"))
    return folder


def starting_config(arguments: Sequence[str]) -> tuple[TrainConfig, str]:
    """The settings that the other flags change, and the label of the run's folder.

    Raises:
        UsageError: --preset beside --resume, an unknown preset, or --model without --task.
    """
    preset = flag_value(arguments, "--preset")
    resume = flag_value(arguments, "--resume")
    model = flag_value(arguments, "--model")
    if resume is not None:
        if preset is not None:
            raise UsageError("--resume takes its settings from the run; leave --preset out")
        return open_run_folder(Path(resume)).read_config(), "run"
    if preset is None and model is not None and model not in PRESETS:
        if flag_value(arguments, "--task") is None:
            raise UsageError(f"--model {model} needs a task: add --task NAME or FILE.jsonl")
        return TrainConfig(), Path(model).name or "model"
    name = preset if preset is not None else (model or "tiny")
    if name not in PRESETS:
        raise UsageError(f"no preset {name!r}; choose from {', '.join(sorted(PRESETS))}")
    return PRESETS[name], name


def flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """Value of `--flag value` or `--flag=value`; None where the flag is absent or has no value."""
    for position, argument in enumerate(arguments):
        if argument == flag and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
    return None
