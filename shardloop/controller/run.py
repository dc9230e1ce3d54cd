"""A whole GRPO run: model, workers, warm start, loop, evaluation, checkpoints, export, report.

Floor 4. Called by the command line and by notebooks.

    resolve ─▶ start workers ─▶ [SFT] ─▶ evaluate ─▶ GRPO steps ─▶ evaluate ─▶ export ─▶ report
       │                          │                     │   ▲
       └─ refuses bad input       └─ start/             └───┘ checkpoint, evaluate, stop on request
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardloop import hf
from shardloop.checkpoint import checkpoint_name, latest_checkpoint, prune_checkpoints
from shardloop.config import TrainConfig
from shardloop.controller.events import Evaluated, Event, Note, Progress, Saved
from shardloop.controller.groups import LocalWorkers, WorkerGroup
from shardloop.controller.loop import evaluate, grpo_steps
from shardloop.controller.report import reward_fields, write_report
from shardloop.controller.roles import build_engine, build_sync, build_trainer, release
from shardloop.controller.rollouts import rollout
from shardloop.controller.rundir import RunFolder
from shardloop.controller.setup import Setup, describe, resolve
from shardloop.controller.sft import sft_steps
from shardloop.controller.track import open_sink
from shardloop.errors import CheckpointError, Interrupted, UsageError
from shardloop.metrics import JsonlWriter, read_jsonl
from shardloop.smollm2 import fetch_smollm2
from shardloop.tiny import build_tiny
from shardloop.types import Completion

EXPORT_CHECK_SAMPLES = 8
"""Completions on which the exported model's log-probs are compared with the engine's."""
EXPORT_TOLERANCE = 1e-2
"""Largest difference taken for rounding (bf16 engines); fp32 stays near 1e-5."""


@dataclass(frozen=True, slots=True)
class Groups:
    trainer: WorkerGroup
    engine: WorkerGroup
    sync: WorkerGroup


def check(config: TrainConfig) -> str:
    """The resolved run as text; nothing is started, nothing left behind. Errors as `resolve`."""
    with tempfile.TemporaryDirectory() as folder:
        model_dir = model_folder(config.model, Path(folder), seed=config.seed, say=print)
        return describe(resolve(config, model_dir))


def model_folder(model: str, folder: Path, *, seed: int, say: Callable[[str], None]) -> Path:
    """The Hugging Face folder of `model`; a built-in one is made in `folder` or fetched first."""
    if model == "tiny":
        return build_tiny(folder / "tiny", seed=seed)
    if model == "smollm2":
        return fetch_smollm2(say=say)
    return Path(model)


def train(
    config: TrainConfig,
    folder: RunFolder,
    *,
    resume: bool = False,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Carries out a run in `folder` and tells what happens; closing the iterator stops the workers.

    Args:
        resume: go on from the newest checkpoint in the folder, if there is one.
        stop_requested: asked after every step; True saves a checkpoint and ends the run.
    Raises:
        Interrupted: `stop_requested` became true. Any other ShardloopError: see `errors`.
    """
    notes: list[str] = []
    model_dir = model_folder(config.model, folder.root, seed=config.seed, say=notes.append)
    setup = resolve(config, model_dir)
    yield from (Note(text) for text in (*notes, describe(setup), f"run folder {folder.root}"))
    plan = setup.proof.plan
    folder.write_manifest(config, {"model": str(model_dir), "plan": plan.summary()})
    yield Note(f"starting {setup.placement.world_size} worker processes")
    with start_workers(setup) as workers:
        if config.sft.steps and not folder.start.exists():
            yield from warm_start(workers, setup, folder.start, stop_requested)
        if folder.start.exists():
            setup = replace(setup, model_dir=folder.start)
        groups = spawn(workers, setup)
        yield from run_loop(setup, groups, folder, resume=resume, stop_requested=stop_requested)
        yield from finish(setup, groups, folder)


def fine_tune(config: TrainConfig, out: Path) -> Iterator[Event]:
    """Supervised steps on the trainer's ranks alone; the result is the model folder `out`.

    Raises:
        UsageError: `out` exists. Otherwise as `train`.
    """
    if out.exists():
        raise UsageError(f"out={out} exists; choose a new folder")
    with tempfile.TemporaryDirectory() as temporary:
        notes: list[str] = []
        model_dir = model_folder(config.model, Path(temporary), seed=config.seed, say=notes.append)
        setup = resolve(config, model_dir)
        yield from (Note(text) for text in notes)
        workers = config.workers
        with LocalWorkers(
            {"trainer": setup.placement.trainer_ranks},
            threads=workers.threads,
            timeout_s=workers.timeout_s,
            device=workers.device,
        ) as processes:
            yield from warm_start(processes, setup, out)


def start_workers(setup: Setup) -> LocalWorkers:
    everyone = tuple(range(setup.placement.world_size))
    workers = setup.config.workers
    return LocalWorkers(
        {**setup.placement.roles(), "sync": everyone},
        threads=workers.threads,
        timeout_s=workers.timeout_s,
        device=workers.device,
    )


def spawn(workers: LocalWorkers, setup: Setup) -> Groups:
    """Trainer and engine on their ranks, and the weight sync between them, on all ranks."""
    config, hf_config, placement = setup.config, setup.hf_config, setup.placement
    return Groups(
        trainer=workers.spawn("trainer", build_trainer, config, setup.model_dir, role="trainer"),
        engine=workers.spawn("engine", build_engine, config.engine, hf_config, role="engine"),
        sync=workers.spawn("sync", build_sync, config, hf_config, placement, role="sync"),
    )


def warm_start(
    workers: LocalWorkers,
    setup: Setup,
    start: Path,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Supervised steps from `setup.model_dir`; the result is the folder `start`.

    Raises:
        Interrupted: `stop_requested` became true; nothing was written.
    """
    config = setup.config
    sft = config.sft
    # A warm start has its own optimizer and needs no reference policy.
    own = replace(config, optim=sft.optim, grpo=replace(config.grpo, kl_coef=0.0))
    trainer = workers.spawn("sft", build_trainer, own, setup.model_dir, role="trainer")
    steps = sft_steps(
        trainer, task=setup.task, tokenizer=setup.tokenizer, config=sft, seed=config.seed
    )
    for metrics in steps:
        yield Progress("sft", metrics["step"], sft.steps, metrics)
        if stop_requested():
            raise Interrupted(f"stopped after SFT step {metrics['step']}; nothing was written")
    trainer.call("export", start)
    workers.run(release, "sft", role="trainer")
    yield Saved("warm start", start)


def run_loop(
    setup: Setup,
    groups: Groups,
    folder: RunFolder,
    *,
    resume: bool,
    stop_requested: Callable[[], bool],
) -> Iterator[Event]:
    """Evaluation, then GRPO steps with evaluations and checkpoints between them."""
    config = setup.config
    start = 0
    newest = latest_checkpoint(folder.checkpoints) if resume else None
    if newest is not None:
        start = groups.trainer.call("load", newest, collect="first")["step"]
        yield Note(f"resumed at step {start} from {newest}")
    folder.forget_after(start)
    if not (folder.evals.exists() and read_jsonl(folder.evals)):
        yield measure(setup, groups, folder, step=0)
    steps = grpo_steps(
        trainer=groups.trainer,
        engine=groups.engine,
        sync=groups.sync,
        task=setup.task,
        reward=setup.reward,
        tokenizer=setup.tokenizer,
        sampling=setup.sampling,
        context_length=setup.context_length,
        config=config,
        start=start,
    )
    metrics_file = JsonlWriter(folder.metrics)
    sink = open_sink(config.track, folder.tensorboard)
    try:
        for step in steps:
            metrics_file.write(step.metrics)
            sink.write(step.number, step.metrics)
            yield Progress("train", step.number, config.steps, step.metrics)
            is_last = step.number == config.steps
            stop = stop_requested() and not is_last
            if is_last or stop or _is_due(step.number, config.checkpoint.every):
                yield save(setup, groups, folder, step=step.number)
            if stop:
                raise Interrupted(
                    f"stopped after step {step.number} of {config.steps}; go on with "
                    f"`shardloop train --resume {folder.root}`"
                )
            if is_last or _is_due(step.number, config.eval.every):
                yield measure(setup, groups, folder, step=step.number)
    finally:
        metrics_file.close()
        sink.close()


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def save(setup: Setup, groups: Groups, folder: RunFolder, *, step: int) -> Saved:
    path = folder.checkpoints / checkpoint_name(step)
    groups.trainer.call("save", path, extra={"step": step})
    prune_checkpoints(folder.checkpoints, keep=setup.config.checkpoint.keep)
    return Saved("checkpoint", path)


def measure(setup: Setup, groups: Groups, folder: RunFolder, *, step: int) -> Evaluated:
    """Greedy and sampled reward on the held-out prompts, with the trainer's present weights."""
    version = groups.trainer.call("version", collect="same")
    groups.sync.call("sync", version)
    record: dict[str, Any] = {"step": step, "prompts": len(setup.test_prompts)}
    for name, temperature in (("greedy", 0.0), ("sampled", setup.config.sampling.temperature)):
        result = evaluate(
            engine=groups.engine,
            prompts=setup.test_prompts,
            reward=setup.reward,
            tokenizer=setup.tokenizer,
            sampling=replace(setup.sampling, temperature=temperature),
            context_length=setup.context_length,
        )
        record |= reward_fields(name, list(result.means.values()))
    writer = JsonlWriter(folder.evals)
    writer.write(record)
    writer.close()
    return Evaluated(step, record)


def finish(setup: Setup, groups: Groups, folder: RunFolder) -> Iterator[Event]:
    """Export, check the export against the engine, write report and curve."""
    groups.trainer.call("export", folder.export)
    difference = export_difference(setup, groups, folder.export)
    if difference > EXPORT_TOLERANCE:
        raise CheckpointError(
            f"{folder.export}: transformers' log-probs differ from the engine's by {difference:.1e}"
        )
    yield Saved(f"export (transformers agrees to {difference:.0e})", folder.export)
    report = write_report(folder)
    yield Saved("report", report)
    yield Saved("curve", folder.curve)


def export_difference(setup: Setup, groups: Groups, export: Path) -> float:
    """Largest difference between transformers' log-probs on the export and the engine's own."""
    groups_of_one = rollout(
        groups.engine,
        setup.test_prompts[:EXPORT_CHECK_SAMPLES],
        samples_per_prompt=1,
        sampling=setup.sampling,
        tokenizer=setup.tokenizer,
        seed=setup.config.seed,
        context_length=setup.context_length,
    )
    model = hf.load_model(export, dtype=torch.float32)
    return max(
        logprob_difference(model, completion)
        for group in groups_of_one
        for completion in group.completions
    )


def logprob_difference(model: torch.nn.Module, completion: Completion) -> float:
    request = completion.request
    token_ids = [*request.prompt_ids, *completion.token_ids_T]
    theirs = hf.sequence_logprobs(model, token_ids, temperature=request.sampling.temperature)
    ours = torch.tensor(completion.full_T)
    return (theirs[len(request.prompt_ids) - 1 :] - ours).abs().max().item()
