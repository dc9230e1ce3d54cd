"""`shardloop sft`: supervised fine-tuning on a task's worked solutions. Floor 5."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from shardloop.cli.interrupt import InterruptFlag
from shardloop.cli.options import WorkersAlone
from shardloop.cli.view import set_up_logging, show
from shardloop.config import SFTConfig, TrainerConfig
from shardloop.controller.sft import fine_tune


@dataclass(frozen=True, kw_only=True)
class SFTCommand:
    """Fine-tune a model on the worked solutions of a task and write it as a model folder."""

    model: str = "tiny"
    """A built-in model (tiny, smollm2) or a Llama, Qwen2 or Qwen3 folder (Hugging Face format)."""
    task: str = "sort"
    """A built-in task, gym:NAME, a JSONL, or one of yours as package.module:function; its
    prompts need a solution."""
    out: Path
    """Folder to write; it must not exist."""
    seed: int = 0
    """Seed of weights and data order."""
    sft: SFTConfig = field(default_factory=lambda: SFTConfig(steps=100))
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    workers: WorkersAlone = field(default_factory=WorkersAlone)
    quiet: Annotated[bool, tyro.conf.arg(aliases=["-q"])] = False
    """Print results only."""
    verbose: Annotated[bool, tyro.conf.arg(aliases=["-v"])] = False
    """Print what workers do."""


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(SFTCommand, prog="shardloop sft", args=list(arguments))
    set_up_logging(verbose=command.verbose)
    with InterruptFlag() as flag:
        events = fine_tune(
            command.model,
            command.task,
            command.out,
            sft=command.sft,
            trainer=command.trainer,
            workers=command.workers,
            seed=command.seed,
            stop_requested=flag.is_set,
        )
        show(events, quiet=command.quiet)
    if command.quiet:
        print(command.out)
    return 0
