"""Settings of a run: frozen dataclasses, composed, checked when made. Floor 0.

The docstring under a field is its help text on the command line. Vetted sets of values are in
`shardloop.presets`.
"""

from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from shardloop.errors import UsageError

Device = Literal["cpu", "cuda"]
DTypeName = Literal["float32", "float64", "bfloat16"]
Std = Literal["sample", "population", "none"]
CorrectionKind = Literal["none", "token", "sequence"]
Schedule = Literal["constant", "cosine"]
Tracker = Literal["none", "tensorboard"]
ConfigT = TypeVar("ConfigT")


def _require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise UsageError(f"{name}={value}; {allowed}")


def _at_least(prefix: str, low: int, **values: float) -> None:
    for field_name, value in values.items():
        name = f"{prefix}.{field_name.replace('_', '-')}"
        _require(
            name, value, low <= value < float("inf"), f"choose a finite value of {low} or more"
        )


def _above_zero(prefix: str, **values: float) -> None:
    for field_name, value in values.items():
        name = f"{prefix}.{field_name.replace('_', '-')}"
        _require(name, value, 0 < value < float("inf"), "choose a finite value above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How completions are drawn in training."""

    max_tokens: int = 16
    """Most tokens of a completion, stop token included."""
    temperature: float = 1.0
    """Sampling temperature of rollouts; the trainer's log-probs use the same."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""

    def __post_init__(self) -> None:
        _at_least("sampling", 1, max_tokens=self.max_tokens)
        _at_least("sampling", 0, top_k=self.top_k)
        _require(
            "sampling.temperature",
            self.temperature,
            0.0 < self.temperature < float("inf"),
            "training needs a finite temperature above 0",
        )
        _require("sampling.top-p", self.top_p, 0.0 < self.top_p <= 1.0, "choose a value in (0, 1]")


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig:
    """The algorithm: groups, advantage, clipped loss, KL, correction."""

    prompts_per_step: int = 16
    """Prompts P of one step."""
    samples_per_prompt: int = 16
    """Completions G of each prompt; at least 2, since the advantage compares them."""
    inner_epochs: int = 1
    """Updates made on each batch."""
    std: Std = "sample"
    """Divide the centred rewards by the group's sample std, its population std, or not at all."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    kl_coef: float = 0.0
    """Weight of the k3 KL term to the frozen starting policy; 0 keeps no reference model."""
    correction: CorrectionKind = "token"
    """Truncated weight exp(trainer - engine log-prob) per token, per sequence, or none."""
    correction_cap: float = 2.0
    """Upper bound of that weight."""

    def __post_init__(self) -> None:
        _at_least("grpo", 1, prompts_per_step=self.prompts_per_step, inner_epochs=self.inner_epochs)
        _at_least("grpo", 1, correction_cap=self.correction_cap)
        _at_least("grpo", 0, kl_coef=self.kl_coef)
        _above_zero("grpo", clip_low=self.clip_low, clip_high=self.clip_high)
        _require("grpo.clip-low", self.clip_low, self.clip_low <= 1.0, "choose a value in (0, 1]")
        _require(
            "grpo.samples-per-prompt",
            self.samples_per_prompt,
            self.samples_per_prompt >= 2,
            "a group of one has no advantage: choose 2 or more",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW on float32 master weights."""

    lr: float = 3e-4
    """Peak learning rate."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 5
    """Steps of linear warm-up."""
    schedule: Schedule = "constant"
    """After the warm-up: constant, or cosine down to a tenth of the peak at the last step."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""

    def __post_init__(self) -> None:
        _at_least(
            "optim",
            0,
            lr=self.lr,
            weight_decay=self.weight_decay,
            warmup_steps=self.warmup_steps,
        )
        _above_zero("optim", eps=self.eps, max_grad_norm=self.max_grad_norm)
        for name, value in (("optim.beta1", self.beta1), ("optim.beta2", self.beta2)):
            _require(name, value, 0.0 <= value < 1.0, "choose a value in [0, 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """How the trained model is cut and fed."""

    layout: str = "fsdp=2"
    """Layout of the trainer's ranks: fsdp=N, dp=R (replicas), or dp=R,fsdp=N."""
    dtype: DTypeName = "float32"
    """Dtype of master weights and arithmetic."""
    row_tokens: int = 256
    """Sequences are packed into rows of at most this many tokens (a longer one has its own row)."""
    rows_per_micro_batch: int = 8
    """Rows that go through the model at once on one rank."""

    def __post_init__(self) -> None:
        _at_least("trainer", 2, row_tokens=self.row_tokens)
        _at_least("trainer", 1, rows_per_micro_batch=self.rows_per_micro_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How the sampling side is cut and sized."""

    layout: str = "engine:tp=2"
    """Layout of the engine's ranks: engine:tp=N."""
    dtype: DTypeName = "float32"
    """Dtype of the engine's weights and arithmetic; weights are converted as they are sent."""
    max_slots: int = 256
    """Sequences decoded at the same time."""

    def __post_init__(self) -> None:
        _at_least("engine", 1, max_slots=self.max_slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """Supervised warm start on the task's own worked solutions."""

    steps: int = 0
    """Optimizer steps; 0 starts RL from the model as it is."""
    batch_size: int = 64
    """Examples of one step."""
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(lr=2e-3, warmup_steps=30, schedule="cosine")
    )

    def __post_init__(self) -> None:
        _at_least("sft", 0, steps=self.steps)
        _at_least("sft", 1, batch_size=self.batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Measurement on held-out prompts."""

    prompts: int = 256
    """Held-out prompts, the same at every evaluation."""
    every: int = 0
    """Steps between greedy evaluations during training; 0 evaluates only before and after."""

    def __post_init__(self) -> None:
        _at_least("eval", 1, prompts=self.prompts)
        _at_least("eval", 0, every=self.every)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every: int = 50
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = 2
    """Newest checkpoints kept."""

    def __post_init__(self) -> None:
        _at_least("checkpoint", 0, every=self.every)
        _at_least("checkpoint", 1, keep=self.keep)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersConfig:
    device: Device = "cpu"
    """Where ranks compute: cpu (gloo) or cuda (NCCL)."""
    threads: int = 1
    """CPU threads of each rank."""
    timeout_s: float = 300.0
    """Seconds after which a call or a collective that has not answered is an error."""
    colocate: bool = False
    """Put the engine on the trainer's ranks instead of ranks of its own."""

    def __post_init__(self) -> None:
        _at_least("workers", 1, threads=self.threads)
        _above_zero("workers", timeout_s=self.timeout_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """One GRPO run."""

    model: str = "tiny"
    """A built-in model (tiny, smollm2) or a Llama, Qwen2 or Qwen3 folder (Hugging Face format)."""
    task: str = "sort"
    """A built-in task, gym:NAME (a reasoning-gym generator), or a JSONL of prompts and answers."""
    reward: str | None = None
    """A named reward, or one of yours as package.module:function; by default the task's own."""
    steps: int = 100
    """GRPO steps of the whole run (a resumed run goes on to the same number)."""
    seed: int = 0
    """Seed of weights, data order and sampling."""
    out: Path = Path("runs")
    """Folder under which the run's folder is made."""
    name: str | None = None
    """Name of the run's folder; by default the preset or model and the seed."""
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
        _require("steps", self.steps, self.steps >= 1, "choose 1 or more")
        _require("seed", self.seed, 0 <= self.seed < 2**31, "choose a value in [0, 2**31)")


def to_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as plain JSON data."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return str(value) if isinstance(value, Path) else value

    result: dict[str, Any] = plain(asdict(config))
    return result


def from_dict(cls: type[ConfigT], data: dict[str, Any]) -> ConfigT:
    """The config dataclass `cls` from what `to_dict` made.

    Raises:
        UsageError: a key that `cls` does not have, or a value its checks refuse.
    """
    hints = get_type_hints(cls)
    unknown = sorted(set(data) - set(hints))
    _require("unknown settings", unknown, not unknown, f"{cls.__name__} has {sorted(hints)}")

    def revive(hint: Any, value: Any) -> Any:
        if isinstance(hint, type) and is_dataclass(hint):
            return from_dict(hint, value)
        return Path(value) if hint is Path else value

    return cls(**{name: revive(hints[name], value) for name, value in data.items()})
