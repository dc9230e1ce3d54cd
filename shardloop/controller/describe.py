"""The resolved run, for people: one line for each group of settings. Floor 4.

Called by `controller.run`, before anything starts and by `shardloop train --check`.
"""

import textwrap
from math import prod
from pathlib import Path

import torch

from shardloop.builtin import BUILTIN
from shardloop.config import GRPOConfig, OptimConfig, TrainConfig
from shardloop.controller.setup import Setup
from shardloop.reshard.cost import cost
from shardloop.tasks import env_maker, no_env

WIDTH = 12
"""Of the first column."""
VERBATIM = ("model", "task", "folder")
"""Lines with paths or texts of the user's, which no line break may alter."""
_WRAPPER = textwrap.TextWrapper(
    width=100, subsequent_indent=" " * WIDTH, break_long_words=False, break_on_hyphens=False
)
MOST_EXAMPLE = 72
"""Characters of the example prompt that are shown."""


def describe(setup: Setup, *, root: Path) -> str:
    """What a run in the folder `root` would be."""
    config, plan = setup.config, setup.proof.plan
    lines = {
        "model": _model(setup),
        "task": _task(setup),
        "sampling": _sampling(setup),
        "SFT": _sft(config),
        "GRPO": _grpo(config),
        "algorithm": _algorithm(config),
        "optimizer": _optim(config.optim),
        "held out": f"{len(setup.test_prompts)} prompts, {_evaluations(config)}",
        "checkpoints": _checkpoints(config),
        "trainer": f"{plan.src.spec} on ranks {list(setup.placement.trainer_ranks)}, "
        f"{_trainer(config)}",
        "engine": f"{plan.dst.spec} on ranks {list(setup.placement.engine_ranks)}, "
        f"{_engine(setup)}",
        "plan": f"{plan.digest[:12]}, proved: it writes every element of the engine's weights once",
        "each sync": _wire(setup),
        "folder": str(root),
    }
    rows = {name: f"{name:<{WIDTH}}{text}" for name, text in lines.items()}
    return "\n".join(row if name in VERBATIM else _wrapped(row) for name, row in rows.items())


def _wrapped(text: str) -> str:
    """Lines of at most 100 columns; the further ones begin under the second column."""
    lines = text.split("\n")
    wraps = [_WRAPPER.wrap(line) for line in lines]
    return "\n".join(line for wrap in wraps for line in wrap)


def _model(setup: Setup) -> str:
    name, model = setup.config.model, setup.model
    num_parameters = sum(prod(shape) for shape in model.canonical.tensor_shapes().values())
    origin = "built in, " if name in BUILTIN else ""
    kind = model.hf_config["model_type"]
    return f"{name} ({origin}{kind}, {num_parameters / 1e6:.2f} M parameters)"


def _task(setup: Setup) -> str:
    example = setup.task.prompts("train", seed=setup.config.seed, start=0, count=1)[0]
    text = repr(example.text if example.text is not None else list(example.messages or ()))
    if len(text) > MOST_EXAMPLE:
        text = text[:MOST_EXAMPLE] + "…"
    turns = ", in turns with an environment" if env_maker(setup.task) is not no_env else ""
    return f"{setup.task.name}{turns}, judged by {setup.reward_name}; e.g. {text}"


def _sampling(setup: Setup) -> str:
    drawn = setup.sampling
    cuts = f", top-p {drawn.top_p:g}" if drawn.top_p < 1.0 else ""
    cuts += f", top-k {drawn.top_k}" if drawn.top_k else ""
    cuts += f", min-p {drawn.min_p:g}" if drawn.min_p else ""
    own = () if setup.task.stop_text is None else (setup.task.stop_text,)
    stops = dict.fromkeys((*own, *drawn.stop))
    cuts += f", up to {' or '.join(map(repr, stops))}" if stops else ""
    of = " over all turns" if env_maker(setup.task) is not no_env else ""
    return f"at most {drawn.max_tokens} tokens{of}, temperature {drawn.temperature:g}{cuts}"


def _sft(config: TrainConfig) -> str:
    sft = config.sft
    if not sft.steps:
        return "none: GRPO starts from the model as it is"
    return f"{sft.steps} steps of {sft.batch_size} examples; {_optim(sft.optim)}"


def _grpo(config: TrainConfig) -> str:
    grpo = config.grpo
    batch = grpo.prompts_per_step * grpo.samples_per_prompt
    epochs = f" x {grpo.inner_epochs} epochs" if grpo.inner_epochs > 1 else ""
    rounds = grpo.resample_rounds
    more = f"; up to {rounds} further rounds for groups of equal rewards" if rounds else ""
    return (
        f"{config.steps} steps of {grpo.prompts_per_step} prompts x {grpo.samples_per_prompt} "
        f"samples = {batch} completions{epochs}{more}"
    )


def _algorithm(config: TrainConfig) -> str:
    """Two lines: where the signal comes from, and what the loss is."""
    grpo = config.grpo
    std = f" (std: {grpo.std})" if grpo.advantage == "grpo" else ""
    overlong = {
        "keep": "",
        "mask": "; overlong completions masked out",
        "penalty": f"; penalty over the last {grpo.overlong_buffer} tokens",
    }[grpo.overlong]
    kl = f"KL {grpo.kl_coef:g} ({grpo.kl_kind}, in the {grpo.kl_in})"
    terms = [
        f"{grpo.loss} loss, clipped at 1-{grpo.clip_low:g} and 1+{grpo.clip_high:g}, "
        f"{grpo.aggregation}{_divisor(config)}",
        *([f"dual clip {grpo.dual_clip:g}"] if grpo.dual_clip is not None else []),
        kl if grpo.kl_coef else "no KL term",
        *([f"entropy bonus {grpo.entropy_coef:g}"] if grpo.entropy_coef else []),
        _correction(grpo),
    ]
    return f"{grpo.advantage} advantages{std}{overlong}\n{'':{WIDTH}}{'; '.join(terms)}"


def _divisor(config: TrainConfig) -> str:
    if config.grpo.aggregation != "sequence-sum":
        return ""
    return f" over {config.grpo.aggregation_constant or config.sampling.max_tokens}"


def _correction(grpo: GRPOConfig) -> str:
    if grpo.correction == "none":
        return "no correction"
    bounds = f"at {grpo.correction_cap:g}"
    if grpo.correction_mode == "mask":
        bounds = f"outside {grpo.correction_floor:g} to {grpo.correction_cap:g}"
    how = {"truncate": "truncated", "mask": "masked"}[grpo.correction_mode]
    return f"correction by {grpo.correction}, {how} {bounds}"


def _trainer(config: TrainConfig) -> str:
    trainer = config.trainer
    parts = [
        trainer.dtype,
        *([f"computing in {trainer.compute_dtype}"] if trainer.compute_dtype else []),
        *(["sequence parallel"] if trainer.sequence_parallel else []),
        *(["activations recomputed"] if trainer.activation_checkpointing else []),
        *(["zero gap to the engine"] if config.zero_gap else []),
    ]
    return ", ".join(parts)


def _engine(setup: Setup) -> str:
    engine = setup.config.engine
    given_up = {"cache": "its cache", "weights": "its cache and weights"}
    sleep = f", gives up {given_up[engine.sleep]} in updates" if engine.sleep != "never" else ""
    return f"{engine.dtype}{sleep}"


def _optim(optim: OptimConfig) -> str:
    return f"learning rate {optim.lr:g}, {optim.schedule} after {optim.warmup_steps} warm-up steps"


def _evaluations(config: TrainConfig) -> str:
    between = f", every {config.eval.every} steps" if config.eval.every else ""
    return f"greedy and sampled, before{between} and after"


def _checkpoints(config: TrainConfig) -> str:
    every, keep = config.checkpoint.every, config.checkpoint.keep
    when = f"every {every} steps and at the end, {keep} kept" if every else "at the end"
    return f"{when}, written while training goes on" if config.checkpoint.background else when


def _wire(setup: Setup) -> str:
    """How weights travel and what they need; and how evenly, where that is as the plan says."""
    transport = setup.config.engine.transport
    itemsize = getattr(torch, setup.config.engine.dtype).itemsize
    moved = cost(setup.proof.plan, itemsize=itemsize)
    least = f"least possible {_size(moved.minimum_bytes)}"
    if transport == "gather":
        return f"gather: whole tensors through one rank, {least}"
    size = f"{transport}: {_size(moved.wire_bytes)} on the wire, {least}"
    if transport == "relay":
        return f"{size}; the trainer sends one replica's part of it"
    first = ", then only what changed" if transport == "delta" else ""
    return (
        f"{size}{first}\n"
        f"{'':{WIDTH}}busiest sender {moved.send_imbalance:.2f} times the mean sender, "
        f"busiest receiver {moved.receive_imbalance:.2f} times the mean receiver"
    )


def _size(num_bytes: int) -> str:
    """Bytes in decimal units, to three digits."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"
