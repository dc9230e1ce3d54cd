"""One run: the settings of its parts together, its measurements and its checkpoints. Floor 0."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from shardloop.config.checks import at_least, check_kinds, require
from shardloop.config.learning import (
    MOST_PROMPTS,
    GRPOConfig,
    OptimConfig,
    SamplingConfig,
    SFTConfig,
)
from shardloop.config.machines import EngineConfig, TrainerConfig, WorkersConfig

Tracker = Literal["none", "tensorboard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Measurement on held-out prompts."""

    prompts: int = 256
    """Held-out prompts, the same at every evaluation."""
    every: int = 0
    """Steps between evaluations (greedy and sampled) in training; 0: only before and after."""

    def __post_init__(self) -> None:
        check_kinds("eval", self)
        at_least("eval", 1, most=MOST_PROMPTS, prompts=self.prompts)
        at_least("eval", 0, every=self.every)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every: int = 50
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = 2
    """Newest checkpoints kept."""
    background: bool = True
    """Write while training goes on, from a copy of weights and optimizer in CPU memory; a rank that
    fails meanwhile costs the checkpoint, not the one before. False: wait until it is written."""

    def __post_init__(self) -> None:
        check_kinds("checkpoint", self)
        at_least("checkpoint", 0, every=self.every)
        at_least("checkpoint", 1, keep=self.keep)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One GRPO run."""

    model: str = "tiny"
    """A built-in model (tiny, smollm2) or a Llama, Qwen2 or Qwen3 folder (Hugging Face format)."""
    task: str = "sort"
    """A built-in task, gym:NAME (a reasoning-gym generator), a JSONL of prompts and answers, or
    one of yours as package.module:function."""
    reward: str | None = None
    """A named reward, or one of yours as package.module:function; by default the task's own."""
    steps: int = 100
    """GRPO steps of the whole run (a resumed run goes on to the same number)."""
    seed: int = 0
    """Seed of weights, data order and sampling."""
    out: Path = Path("runs")
    """Folder under which the run's folder is made."""
    name: str | None = None
    """Name of the run's folder; by default the preset or model, the task if given, and the seed."""
    zero_gap: bool = False
    """Run trainer and engine on the same batch-invariant kernels: their log-probs are equal bit for
    bit. Slower; needs an engine with tp=1 and a trainer without tp."""
    track: Tracker = "none"
    """Where metrics go besides the run's files; tensorboard needs the extra `track`."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    grpo: GRPOConfig = field(default_factory=GRPOConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)

    def __post_init__(self) -> None:
        check_kinds("", self)
        at_least("", 1, steps=self.steps)
        require("seed", self.seed, 0 <= self.seed < 2**31, "choose a value in [0, 2**31)")
        if self.name is not None:
            require("name", repr(self.name), _is_folder_name(self.name), "choose one folder name")


def _is_folder_name(name: str) -> bool:
    """One component of a path, printable, as every file system takes it."""
    return (
        0 < len(name.encode("utf-8", "replace")) <= 200
        and name.isprintable()
        and name not in (".", "..")
        and not set(name) & set("/\\")
    )
