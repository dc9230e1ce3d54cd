"""Settings of a run: frozen dataclasses, composed, checked when made. Floor 0.

The docstring under a field is its help text on the command line. Vetted sets of values are in
`shardloop.presets`.
"""

import math
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from shardloop.errors import UsageError
from shardloop.types import MIN_TEMPERATURE

Device = Literal["cpu", "cuda"]
DTypeName = Literal["float32", "float64", "bfloat16"]
Std = Literal["sample", "population", "none"]
AdvantageKind = Literal["grpo", "rloo", "reinforce++"]
PolicyLossKind = Literal["ppo", "gspo", "cispo"]
Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum", "prompt-mean"]
KLEstimator = Literal["k1", "k2", "k3"]
KLPlace = Literal["loss", "reward"]
CorrectionKind = Literal["none", "token", "sequence", "geometric"]
CorrectionMode = Literal["truncate", "mask"]
Overlong = Literal["keep", "mask", "penalty"]
Sleep = Literal["never", "cache", "weights"]
Schedule = Literal["constant", "cosine"]
Tracker = Literal["none", "tensorboard"]
ConfigT = TypeVar("ConfigT")


MOST_COUNT = 10**9
MOST_PROMPTS = 100_000
"""In one step, or in one evaluation."""
MOST_COMPLETIONS = 1_000_000
"""Of one step."""
MOST_TIMEOUT_S = 1e7
MOST_ROUNDS = 100


def _flag(prefix: str, field_name: str) -> str:
    return f"{prefix}.{field_name.replace('_', '-')}".removeprefix(".")


def _require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise UsageError(f"{name}={value}; {allowed}")


def _check_kinds(prefix: str, config: Any) -> None:
    """Every field has a value of its declared type: the command line sees to that, Python not."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal:
            allowed = get_args(hint)
            text = f"choose {' or '.join(map(str, allowed))}"
            _require(_flag(prefix, name), repr(value), value in allowed, text)
            continue
        if get_origin(hint) is tuple:
            _require(_flag(prefix, name), repr(value), type(value) is tuple, "it must be a tuple")
            continue
        if type(None) in get_args(hint) and get_origin(get_args(hint)[0]) is Literal:
            allowed = (*get_args(get_args(hint)[0]), None)
            text = f"choose {' or '.join(map(str, allowed))}"
            _require(_flag(prefix, name), repr(value), value in allowed, text)
            continue
        kinds = get_args(hint) or (hint,)
        kinds += (int,) if float in kinds else ()
        ok = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        wanted = " or ".join(WORDS.get(kind, kind.__name__) for kind in get_args(hint) or (hint,))
        _require(_flag(prefix, name), repr(value), ok, f"it must be {wanted}")


WORDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "left out",
}


def _at_least(prefix: str, low: int, *, most: float | None = None, **values: float) -> None:
    """Whole numbers are at most `MOST_COUNT` unless `most` says otherwise; others are finite."""
    for field_name, value in values.items():
        bound = MOST_COUNT if most is None and isinstance(value, int) else most
        if bound is None:
            ok, allowed = low <= value < math.inf, f"choose a finite value of {low} or more"
        else:
            ok, allowed = low <= value <= bound, f"choose a value from {low} to {bound}"
        _require(_flag(prefix, field_name), value, ok, allowed)


def _above_zero(prefix: str, **values: float) -> None:
    for field_name, value in values.items():
        ok = 0 < value < math.inf
        _require(_flag(prefix, field_name), value, ok, "choose a finite value above 0")


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
    min_p: float = 0.0
    """Keep tokens at least this share as likely as the likeliest, in [0, 1); 0 keeps all."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the task's and the tokenizer's own."""

    def __post_init__(self) -> None:
        _check_kinds("sampling", self)
        _at_least("sampling", 1, max_tokens=self.max_tokens)
        _at_least("sampling", 0, top_k=self.top_k)
        _require(
            "sampling.temperature",
            self.temperature,
            MIN_TEMPERATURE <= self.temperature < math.inf,
            f"training needs a finite temperature of {MIN_TEMPERATURE} or more",
        )
        _require("sampling.top-p", self.top_p, 0.0 < self.top_p <= 1.0, "choose a value in (0, 1]")
        _require("sampling.min-p", self.min_p, 0.0 <= self.min_p < 1.0, "choose a value in [0, 1)")
        for text in self.stop:
            ok = isinstance(text, str) and text != ""
            _require("sampling.stop", repr(text), ok, "give texts of at least one character")


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig:
    """The algorithm: groups, advantage, clipped loss, KL, correction."""

    prompts_per_step: int = 16
    """Prompts P of one step."""
    samples_per_prompt: int = 16
    """Completions G of each prompt; at least 2, since the advantage compares them."""
    inner_epochs: int = 1
    """Updates made on each batch."""
    advantage: AdvantageKind = "grpo"
    """grpo: reward minus the group's mean, over its std; rloo: minus the mean of the group's other
    samples; reinforce++: minus the group's mean, then whitened over the tokens of the batch."""
    std: Std = "sample"
    """grpo only: divide the centred rewards by the group's sample std, its population std, or not
    at all (Dr. GRPO)."""
    loss: PolicyLossKind = "ppo"
    """ppo: clipped ratio of each token; gspo: clipped ratio of the whole sequence (geometric mean);
    cispo: the clipped ratio is a constant weight, so that no token loses its gradient."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = None
    """ppo only: a token of negative advantage costs at most this times its size; above 1."""
    aggregation: Aggregation = "token-mean"
    """token-mean: every token of the batch counts the same; sequence-mean: every completion;
    prompt-mean: every prompt; sequence-sum: tokens are summed, over aggregation_constant for each
    completion (Dr. GRPO)."""
    aggregation_constant: int | None = None
    """sequence-sum only: what each completion's sum is divided by; by default
    sampling.max_tokens."""
    kl_coef: float = 0.0
    """Weight of the KL term to the frozen starting policy; 0 keeps no reference model."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL term: k1, k2 or k3 (docs/conventions.md has values and gradients)."""
    kl_in: KLPlace = "loss"
    """Where the KL term goes: into the loss, or off each completion's reward."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus in the loss."""
    correction: CorrectionKind = "token"
    """Weight exp(trainer - engine log-prob) per token, per sequence (product or geometric mean of
    its ratios), or none."""
    correction_mode: CorrectionMode = "truncate"
    """A weight above the cap is cut to it, or what it weighs is masked out."""
    correction_cap: float = 2.0
    """Upper bound of that weight."""
    correction_floor: float = 0.0
    """mask only: what has a weight below this is masked out too."""
    overlong: Overlong = "keep"
    """Completions that reached max_tokens: judged like any other, masked out of the loss, or (all
    that come within overlong_buffer of it) docked up to 1 of their reward."""
    overlong_buffer: int = 0
    """penalty only: tokens before max_tokens over which the penalty rises from 0 to 1."""
    resample_rounds: int = 0
    """Further rounds of prompts, at most, that replace those whose samples all have one reward
    (dynamic sampling)."""

    def __post_init__(self) -> None:
        _check_kinds("grpo", self)
        _at_least("grpo", 1, most=MOST_PROMPTS, prompts_per_step=self.prompts_per_step)
        _at_least("grpo", 1, inner_epochs=self.inner_epochs)
        _at_least("grpo", 1, correction_cap=self.correction_cap)
        _at_least("grpo", 0, kl_coef=self.kl_coef, entropy_coef=self.entropy_coef)
        _at_least("grpo", 0, most=1, correction_floor=self.correction_floor)
        _at_least("grpo", 0, overlong_buffer=self.overlong_buffer)
        _at_least("grpo", 0, most=MOST_ROUNDS, resample_rounds=self.resample_rounds)
        self._check_choices()
        _above_zero("grpo", clip_low=self.clip_low, clip_high=self.clip_high)
        _require("grpo.clip-low", self.clip_low, self.clip_low <= 1.0, "choose a value in (0, 1]")
        _require(
            "grpo.samples-per-prompt",
            self.samples_per_prompt,
            2 <= self.samples_per_prompt <= MOST_PROMPTS,
            f"a group of one has no advantage: choose a value from 2 to {MOST_PROMPTS}",
        )
        num_completions = self.prompts_per_step * self.samples_per_prompt
        _require(
            "grpo.prompts-per-step x grpo.samples-per-prompt",
            num_completions,
            num_completions <= MOST_COMPLETIONS,
            f"choose at most {MOST_COMPLETIONS} completions a step",
        )

    def _check_choices(self) -> None:
        """Every setting that has an effect only beside another one meets it."""
        if self.dual_clip is not None:
            _at_least("grpo", 1, dual_clip=float(self.dual_clip))
            _only("grpo.dual-clip", self.dual_clip, self.loss == "ppo", "grpo.loss=ppo")
        if self.aggregation_constant is not None:
            _at_least("grpo", 1, aggregation_constant=self.aggregation_constant)
            ok = self.aggregation == "sequence-sum"
            _only("grpo.aggregation-constant", self.aggregation_constant, ok, "sequence-sum")
        if self.std != "sample":
            _only("grpo.std", self.std, self.advantage == "grpo", "grpo.advantage=grpo")
        if self.correction_floor > 0.0:
            ok = self.correction_mode == "mask"
            _only("grpo.correction-floor", self.correction_floor, ok, "grpo.correction-mode=mask")
        ok = (self.overlong == "penalty") == (self.overlong_buffer > 0)
        wanted = "give it with grpo.overlong=penalty, and only there"
        _require("grpo.overlong-buffer", self.overlong_buffer, ok, wanted)


def _only(name: str, value: object, ok: bool, beside: str) -> None:
    _require(name, value, ok, f"it has an effect with {beside} only: leave one of them out")


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
        _check_kinds("optim", self)
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
    """Layout of the trainer's ranks: axes dp (replicas), fsdp and tp in this order, such as fsdp=2
    or dp=2,fsdp=2,tp=2."""
    dtype: DTypeName = "float32"
    """Dtype of master weights, and of arithmetic unless compute_dtype says otherwise."""
    compute_dtype: DTypeName | None = None
    """bfloat16 computes in it on float32 master weights; for GPUs, since CPUs are slow at it."""
    sequence_parallel: bool = False
    """Between the tensor-parallel parts, cut activations along the tokens; needs tp."""
    activation_checkpointing: bool = False
    """Compute each layer again in backward instead of keeping its activations."""
    row_tokens: int = 256
    """Sequences are packed into rows of at most this many tokens (a longer one has its own row)."""
    rows_per_micro_batch: int = 8
    """Rows that go through the model at once on one rank."""

    def __post_init__(self) -> None:
        _check_kinds("trainer", self)
        _at_least("trainer", 2, most=2**20, row_tokens=self.row_tokens)
        _at_least("trainer", 1, most=MOST_PROMPTS, rows_per_micro_batch=self.rows_per_micro_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How the sampling side is cut and sized."""

    layout: str = "engine:tp=2"
    """Layout of the engine's ranks: engine:tp=N, or engine:replicas=R,tp=N."""
    dtype: DTypeName = "float32"
    """Dtype of the engine's weights and arithmetic; weights are converted as they are sent."""
    max_slots: int = 256
    """Sequences decoded at the same time by each replica."""
    sleep: Sleep = "never"
    """What the engine gives up while the trainer works: nothing, its cache, or also its weights."""

    def __post_init__(self) -> None:
        _check_kinds("engine", self)
        _at_least("engine", 1, most=MOST_PROMPTS, max_slots=self.max_slots)


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
        _check_kinds("sft", self)
        _at_least("sft", 0, steps=self.steps)
        _at_least("sft", 1, most=MOST_PROMPTS, batch_size=self.batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Measurement on held-out prompts."""

    prompts: int = 256
    """Held-out prompts, the same at every evaluation."""
    every: int = 0
    """Steps between evaluations (greedy and sampled) in training; 0: only before and after."""

    def __post_init__(self) -> None:
        _check_kinds("eval", self)
        _at_least("eval", 1, most=MOST_PROMPTS, prompts=self.prompts)
        _at_least("eval", 0, every=self.every)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    every: int = 50
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = 2
    """Newest checkpoints kept."""

    def __post_init__(self) -> None:
        _check_kinds("checkpoint", self)
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
        _check_kinds("workers", self)
        _at_least("workers", 1, most=1024, threads=self.threads)
        _above_zero("workers", timeout_s=self.timeout_s)
        _at_least("workers", 0, most=MOST_TIMEOUT_S, timeout_s=self.timeout_s)


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
        _check_kinds("", self)
        _at_least("", 1, steps=self.steps)
        _require("seed", self.seed, 0 <= self.seed < 2**31, "choose a value in [0, 2**31)")
        if self.name is not None:
            _require("name", repr(self.name), _is_folder_name(self.name), "choose one folder name")


def _is_folder_name(name: str) -> bool:
    """One component of a path, printable, as every file system takes it."""
    return (
        0 < len(name.encode("utf-8", "replace")) <= 200
        and name.isprintable()
        and name not in (".", "..")
        and not set(name) & set("/\\")
    )


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
        if get_origin(hint) is tuple:
            return tuple(value)
        return Path(value) if hint is Path else value

    return cls(**{name: revive(hints[name], value) for name, value in data.items()})
