"""`shardloop train`: a GRPO run, a check of its settings, or the rest of a run. Floor 5."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Literal

import tyro

from shardloop.checkpoint import latest_checkpoint
from shardloop.cli.interrupt import InterruptFlag
from shardloop.cli.view import set_up_logging, show
from shardloop.config import TrainConfig
from shardloop.controller.report import without_picture, write_seeds_report
from shardloop.controller.run import check, train
from shardloop.controller.rundir import (
    RunFolder,
    create_run_folder,
    open_run_folder,
    planned_run_folder,
)
from shardloop.errors import Interrupted, UsageError
from shardloop.presets import PRESETS


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Improve a language model by GRPO, with sharded training and a tensor-parallel engine."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: Literal["tiny", "smollm2", "calculator"] | None = None
    """Vetted settings to start from; every flag below changes one of them. [default: tiny, or none
    with --model]"""
    resume: Path | None = None
    """Folder of an earlier run to go on with from its newest checkpoint. Flags beside it may change
    how long and where it runs (steps, layouts, workers, checkpoint, eval.every), nothing else."""
    check: bool = False
    """Print the resolved plan and stop before anything runs."""
    seeds: int = 1
    """Runs with consecutive seeds, one after the other, and a report over all of them."""
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """Print results only."""
    verbose: Annotated[bool, tyro.conf.arg(aliases=["-v"])] = False
    """Print what workers do, and the seconds of each phase of a step."""


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
    configs = seed_configs(command.config, num_seeds=command.seeds)
    if command.resume is not None:
        roots = [open_run_folder(command.resume).root]
    else:
        roots = [planned_run_folder(config, label=label) for config in configs]
    if command.check:
        print(check(configs[0], roots[0], resume=command.resume is not None))
        return 0
    with InterruptFlag() as flag:
        if command.resume is not None:
            run_one(configs[0], RunFolder(command.resume), command, stop_requested=flag.is_set)
        else:
            run_seeds(configs, command, label=label, stop_requested=flag.is_set)
    return 0


def seed_configs(config: TrainConfig, *, num_seeds: int) -> list[TrainConfig]:
    """One config for each of consecutive seeds; a given name gets the seed added.

    Raises:
        UsageError: a seed is too large.
    """
    if num_seeds == 1:
        return [config]
    return [
        dataclasses.replace(
            config, seed=seed, name=None if config.name is None else f"{config.name}-seed{seed}"
        )
        for seed in range(config.seed, config.seed + num_seeds)
    ]


def run_seeds(
    configs: Sequence[TrainConfig],
    command: TrainCommand,
    *,
    label: str,
    stop_requested: Callable[[], bool],
) -> None:
    """One run after the other, and a report over all of them.

    Raises:
        Interrupted: `stop_requested` became true; names the seeds that were not begun.
    """
    folders = []
    for place, config in enumerate(configs):
        later = [str(other.seed) for other in configs[place + 1 :]]
        folders.append(create_run_folder(config, label=label))
        try:
            run_one(config, folders[-1], command, stop_requested=stop_requested)
            if later and stop_requested():
                raise Interrupted(f"stopped after the run of seed {config.seed}")
        except Interrupted as error:
            if not later:
                raise
            raise Interrupted(f"{error} (not begun: seed {', '.join(later)})") from error
    if len(folders) > 1:
        path = write_seeds_report([folder.root for folder in folders], configs[0].out)
        print(path.read_text(encoding="utf-8"), end="")
        print(f"\nseeds report: {path}")


def run_one(
    config: TrainConfig,
    folder: RunFolder,
    command: TrainCommand,
    *,
    stop_requested: Callable[[], bool],
) -> None:
    resume = command.resume is not None
    try:
        show(
            train(config, folder, resume=resume, stop_requested=stop_requested),
            quiet=command.quiet,
            verbose=command.verbose,
        )
    except KeyboardInterrupt:
        raise Interrupted(ended_at_once(folder)) from None
    print(without_picture(folder.report.read_text(encoding="utf-8")))


def ended_at_once(folder: RunFolder) -> str:
    """What a second Ctrl-C leaves, and how to go on from it."""
    if not folder.has_progress():
        return "ended at once; there is nothing to go on from yet"
    newest = latest_checkpoint(folder.checkpoints)
    place = "the start of its steps" if newest is None else newest.name
    return f"ended at once; go on from {place} with `shardloop train --resume {folder.root}`"


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
        return TrainConfig(), with_task(Path(model).name or "model", arguments, own=None)
    name = preset if preset is not None else (model or "tiny")
    if name not in PRESETS:
        raise UsageError(f"no preset {name!r}; choose from {', '.join(sorted(PRESETS))}")
    return PRESETS[name], with_task(name, arguments, own=PRESETS[name].task)


def with_task(label: str, arguments: Sequence[str], *, own: str | None) -> str:
    """The label, with the task where a flag names another than the preset's own: of a path its
    last part."""
    task = flag_value(arguments, "--task")
    if task in (None, own):
        return label
    name = PurePath(task).name.removesuffix(".jsonl")
    return f"{label}-{re.sub(r'[^A-Za-z0-9._]+', '-', name)}"


def flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """Value of `--flag value` or `--flag=value`; None where the flag is absent or has no value."""
    for position, argument in enumerate(arguments):
        if argument == flag and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
    return None
