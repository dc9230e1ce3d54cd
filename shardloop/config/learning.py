"""What is learned and how: sampling, the algorithm, the optimizer, the warm start. Floor 0."""

import math
from dataclasses import dataclass, field
from typing import Literal

from shardloop.config.checks import above_zero, at_least, check_kinds, only, require
from shardloop.types import MIN_TEMPERATURE

Std = Literal["sample", "population", "none"]
AdvantageKind = Literal["grpo", "rloo", "reinforce++"]
PolicyLossKind = Literal["ppo", "gspo", "cispo"]
Aggregation = Literal["token-mean", "sequence-mean", "sequence-sum", "prompt-mean"]
KLEstimator = Literal["k1", "k2", "k3"]
KLPlace = Literal["loss", "reward"]
CorrectionKind = Literal["none", "token", "sequence", "geometric"]
CorrectionMode = Literal["truncate", "mask"]
Overlong = Literal["keep", "mask", "penalty"]
Schedule = Literal["constant", "cosine"]

MOST_PROMPTS = 100_000
"""In one step, or in one evaluation."""
MOST_COMPLETIONS = 1_000_000
"""Of one step."""
MOST_ROUNDS = 100
DEFAULT_CAP = 2.0
MOST_RATE = 100.0
"""AdamW moves a weight by about the learning rate a step, whatever the gradient."""


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
        check_kinds("sampling", self)
        at_least("sampling", 1, max_tokens=self.max_tokens)
        at_least("sampling", 0, top_k=self.top_k)
        require(
            "sampling.temperature",
            self.temperature,
            MIN_TEMPERATURE <= self.temperature < math.inf,
            f"training needs a finite temperature of {MIN_TEMPERATURE} or more",
        )
        require("sampling.top-p", self.top_p, 0.0 < self.top_p <= 1.0, "choose a value in (0, 1]")
        require("sampling.min-p", self.min_p, 0.0 <= self.min_p < 1.0, "choose a value in [0, 1)")
        for text in self.stop:
            ok = isinstance(text, str) and text != ""
            require("sampling.stop", repr(text), ok, "give texts of at least one character")


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPOConfig:
    """The algorithm: groups, advantage, clipped loss, KL, correction."""

    prompts_per_step: int = 16
    """Prompts P of one step."""
    samples_per_prompt: int = 16
    """Completions G of each prompt; at least 2, since the advantage compares them."""
    inner_epochs: int = 1
    """Updates made on each batch. The first finds every ratio at exactly 1: with a single one
    nothing is ever clipped, and ppo, gspo and cispo have the same gradient."""
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
    kl_estimator: KLEstimator | None = None
    """Estimator of the KL term; by default k3 in the loss and k1, whose gradient is the true one
    there, in the reward (docs/conventions.md has values and gradients)."""
    kl_in: KLPlace = "loss"
    """Where the KL term goes: into the loss, or off each completion's reward."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus in the loss."""
    correction: CorrectionKind = "token"
    """Weight exp(trainer - engine log-prob) per token, per sequence (product or geometric mean of
    its ratios), or none."""
    correction_mode: CorrectionMode = "truncate"
    """A weight above the cap is cut to it, or what it weighs is masked out."""
    correction_cap: float = DEFAULT_CAP
    """Upper bound of that weight."""
    correction_floor: float = 0.0
    """mask only: what has a weight below this is masked out too."""
    overlong: Overlong = "keep"
    """keep: completions that were cut off (by max_tokens, or by the end of the context) are judged
    like any other; mask: they stay out of the loss, though their rewards count in their group's
    mean; penalty: all that come within overlong_buffer of max_tokens lose up to 1 of their
    reward."""
    overlong_buffer: int = 0
    """penalty only: tokens before max_tokens over which the penalty rises from 0 to 1. Only tokens
    that the policy chose count, over all turns together, as for max_tokens."""
    resample_rounds: int = 0
    """Further rounds of prompts, at most, that replace groups which can teach nothing: all samples
    have one reward, or are masked out (dynamic sampling). Every step has the prompts of all its
    rounds set aside, drawn or not, so a pass over the task's questions leaves out those not
    drawn."""

    def __post_init__(self) -> None:
        check_kinds("grpo", self)
        at_least("grpo", 1, most=MOST_PROMPTS, prompts_per_step=self.prompts_per_step)
        at_least("grpo", 1, inner_epochs=self.inner_epochs)
        at_least("grpo", 1, correction_cap=self.correction_cap)
        at_least("grpo", 0, kl_coef=self.kl_coef, entropy_coef=self.entropy_coef)
        at_least("grpo", 0, most=1, correction_floor=self.correction_floor)
        at_least("grpo", 0, overlong_buffer=self.overlong_buffer)
        at_least("grpo", 0, most=MOST_ROUNDS, resample_rounds=self.resample_rounds)
        self._check_choices()
        above_zero("grpo", clip_low=self.clip_low, clip_high=self.clip_high)
        require("grpo.clip-low", self.clip_low, self.clip_low <= 1.0, "choose a value in (0, 1]")
        require(
            "grpo.samples-per-prompt",
            self.samples_per_prompt,
            2 <= self.samples_per_prompt <= MOST_PROMPTS,
            f"a group of one has no advantage: choose a value from 2 to {MOST_PROMPTS}",
        )
        num_completions = self.prompts_per_step * self.samples_per_prompt
        require(
            "grpo.prompts-per-step x grpo.samples-per-prompt",
            num_completions,
            num_completions <= MOST_COMPLETIONS,
            f"choose at most {MOST_COMPLETIONS} completions a step",
        )

    @property
    def kl_kind(self) -> KLEstimator:
        """The estimator of the KL term."""
        return self.kl_estimator or ("k3" if self.kl_in == "loss" else "k1")

    def _check_choices(self) -> None:
        """Every setting that has an effect only beside another one meets it."""
        if self.dual_clip is not None:
            above = 1.0 < self.dual_clip < math.inf
            require("grpo.dual-clip", self.dual_clip, above, "choose a finite value above 1")
            only("grpo.dual-clip", self.dual_clip, self.loss == "ppo", "grpo.loss=ppo")
        if self.aggregation_constant is not None:
            at_least("grpo", 1, aggregation_constant=self.aggregation_constant)
            ok = self.aggregation == "sequence-sum"
            only("grpo.aggregation-constant", self.aggregation_constant, ok, "sequence-sum")
        if self.std != "sample":
            only("grpo.std", self.std, self.advantage == "grpo", "grpo.advantage=grpo")
        if self.correction_floor > 0.0:
            ok = self.correction_mode == "mask"
            only("grpo.correction-floor", self.correction_floor, ok, "grpo.correction-mode=mask")
        if self.correction_mode != "truncate":
            ok = self.correction != "none"
            only("grpo.correction-mode", self.correction_mode, ok, "a grpo.correction")
        if self.correction_cap != DEFAULT_CAP:
            ok = self.correction != "none"
            only("grpo.correction-cap", self.correction_cap, ok, "a grpo.correction")
        if self.kl_in != "loss":
            only("grpo.kl-in", self.kl_in, self.kl_coef > 0.0, "a grpo.kl-coef above 0")
        if self.kl_estimator is not None:
            ok = self.kl_coef > 0.0
            only("grpo.kl-estimator", self.kl_estimator, ok, "a grpo.kl-coef above 0")
        ok = (self.overlong == "penalty") == (self.overlong_buffer > 0)
        wanted = "give it with grpo.overlong=penalty, and only there"
        require("grpo.overlong-buffer", self.overlong_buffer, ok, wanted)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW on float32 master weights."""

    lr: float = 3e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the running mean of gradients, in [0, 1)."""
    beta2: float = 0.95
    """Decay of the running mean of squared gradients, in [0, 1)."""
    eps: float = 1e-8
    """Added to the root of that mean, which a gradient is divided by."""
    weight_decay: float = 0.0
    """Share of each weight taken off in a step, times the learning rate; not from the gradient."""
    warmup_steps: int = 5
    """Steps of linear warm-up."""
    schedule: Schedule = "constant"
    """After the warm-up: constant, or cosine down to a tenth of the peak at the last step."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""

    def __post_init__(self) -> None:
        check_kinds("optim", self)
        at_least("optim", 0, most=MOST_RATE, lr=self.lr, weight_decay=self.weight_decay)
        at_least("optim", 0, warmup_steps=self.warmup_steps)
        above_zero("optim", eps=self.eps, max_grad_norm=self.max_grad_norm)
        for name, value in (("optim.beta1", self.beta1), ("optim.beta2", self.beta2)):
            require(name, value, 0.0 <= value < 1.0, "choose a value in [0, 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
class SFTConfig:
    """Supervised warm start on the task's own worked solutions."""

    steps: int = 0
    """Supervised steps; with 0 the model stays as it is."""
    batch_size: int = 64
    """Examples of one step."""
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(lr=2e-3, warmup_steps=30, schedule="cosine")
    )

    def __post_init__(self) -> None:
        check_kinds("sft", self)
        at_least("sft", 0, steps=self.steps)
        at_least("sft", 1, most=MOST_PROMPTS, batch_size=self.batch_size)
