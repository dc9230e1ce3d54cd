"""A whole GRPO run: model, workers, warm start, loop, evaluation, checkpoints, export, report.

Floor 4. Called by the command line and by notebooks.

    resolve ─▶ start workers ─▶ [SFT] ─▶ evaluate ─▶ GRPO steps ─▶ evaluate ─▶ export ─▶ report
       │                          │                     │   ▲
       └─ refuses bad input       └─ start/             └───┘ checkpoint, evaluate, stop on request
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from shardloop import hf
from shardloop.builtin import model_folder, temporary_model_folder
from shardloop.checkpoint import checkpoint_name, latest_checkpoint, prune_checkpoints
from shardloop.config import TrainConfig
from shardloop.controller.evals import reward_fields
from shardloop.controller.events import Evaluated, Event, Note, Progress, Saved
from shardloop.controller.export import export_policy
from shardloop.controller.groups import LocalWorkers, WorkerGroup
from shardloop.controller.loop import evaluate, grpo_steps
from shardloop.controller.report import write_report
from shardloop.controller.roles import build_engine, build_sync, build_trainer
from shardloop.controller.rollouts import Sampler
from shardloop.controller.rundir import RunFolder
from shardloop.controller.setup import Setup, describe, resolve
from shardloop.controller.sft import warm_start
from shardloop.controller.track import open_sink
from shardloop.errors import Interrupted
from shardloop.metrics import append_jsonl, read_jsonl, writing


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The two halves of a run and what joins them."""

    trainer: WorkerGroup
    sampler: Sampler
    """Has the group of engines."""
    sync: WorkerGroup
    """On all ranks."""


def check(config: TrainConfig) -> str:
    """The resolved run as text; nothing is started, nothing left behind. Errors as `resolve`."""
    with temporary_model_folder(config.model, seed=config.seed) as model_dir:
        return describe(resolve(config, model_dir))


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
        Interrupted: `stop_requested` became true. CheckpointError: `folder` cannot be written.
        Any other ShardloopError: see `errors`.
    """
    notes: list[str] = []
    with writing(folder.root):
        model_dir = model_folder(config.model, folder.root, seed=config.seed, say=notes.append)
    setup = resolve(config, model_dir)
    yield from (Note(text) for text in (*notes, describe(setup), f"run folder {folder.root}"))
    plan = setup.proof.plan
    folder.write_manifest(config, {"model": str(model_dir), "plan": plan.summary()})
    yield Note(f"starting {setup.placement.world_size} worker processes")
    with start_workers(setup) as workers:
        if config.sft.steps and not has_start(folder):
            yield from warm_start(
                workers,
                task=setup.task,
                tokenizer=setup.tokenizer,
                model_dir=model_dir,
                context_length=setup.model.context_length,
                trainer=config.trainer,
                sft=config.sft,
                seed=config.seed,
                start=folder.start,
                stop_requested=stop_requested,
            )
        if has_start(folder):
            setup = replace(setup, model_dir=folder.start)
        roles = spawn(workers, setup)
        yield from run_loop(setup, roles, folder, resume=resume, stop_requested=stop_requested)
        yield from finish(setup, roles, folder)


def has_start(folder: RunFolder) -> bool:
    """Whether the start is whole: the weights of a model folder are written last."""
    return (folder.start / hf.WEIGHTS_FILE).is_file()


def start_workers(setup: Setup) -> LocalWorkers:
    everyone = range(setup.placement.world_size)
    return LocalWorkers({**setup.placement.roles(), "sync": everyone}, setup.config.workers)


def spawn(workers: LocalWorkers, setup: Setup) -> Roles:
    """Trainer and engine on their ranks, and the weight sync between them, on all ranks."""
    config = setup.config
    trainer = workers.spawn(
        "trainer",
        build_trainer,
        config.trainer,
        config.optim,
        setup.model_dir,
        reference=config.grpo.kl_coef > 0.0,
        role="trainer",
    )
    engine = workers.spawn(
        "engine", build_engine, config.engine, setup.model.hf_config, role="engine"
    )
    sync = workers.spawn("sync", build_sync, config, setup.proof, role="sync")
    return Roles(trainer=trainer, sampler=setup.sampler(engine), sync=sync)


def run_loop(
    setup: Setup,
    roles: Roles,
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
        start = roles.trainer.call("load", newest, collect="first")["step"]
        yield Note(f"resumed at step {start} from {newest}")
    folder.forget_after(start)
    if not read_jsonl(folder.evals):
        yield measure(setup, roles, folder, step=0)
    steps = grpo_steps(
        trainer=roles.trainer,
        sampler=roles.sampler,
        sync=roles.sync,
        task=setup.task,
        reward=setup.reward,
        config=config,
        start=start,
    )
    with closing(open_sink(config.track, folder.tensorboard)) as sink:
        for step in steps:
            append_jsonl(folder.metrics, step.metrics)
            sink.write(step.number, step.metrics)
            yield Progress("train", step.number, config.steps, step.metrics)
            is_last = step.number == config.steps
            stop = stop_requested() and not is_last
            if is_last or stop or _is_due(step.number, config.checkpoint.every):
                yield save(setup, roles, folder, step=step.number)
            if stop:
                raise Interrupted(
                    f"stopped after step {step.number} of {config.steps}; go on with "
                    f"`shardloop train --resume {folder.root}`"
                )
            if is_last or _is_due(step.number, config.eval.every):
                yield measure(setup, roles, folder, step=step.number)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def save(setup: Setup, roles: Roles, folder: RunFolder, *, step: int) -> Saved:
    path = folder.checkpoints / checkpoint_name(step)
    roles.trainer.call("save", path, extra={"step": step})
    with writing(folder.checkpoints):
        prune_checkpoints(folder.checkpoints, keep=setup.config.checkpoint.keep)
    return Saved("checkpoint", path)


def measure(setup: Setup, roles: Roles, folder: RunFolder, *, step: int) -> Evaluated:
    """Greedy and sampled reward on the held-out prompts, with the trainer's present weights."""
    roles.sync.call("sync", roles.trainer.call("version", collect="same"))
    record: dict[str, Any] = {"step": step, "prompts": len(setup.test_prompts)}
    for name, sampler in (("greedy", roles.sampler.at(0.0)), ("sampled", roles.sampler)):
        result = evaluate(sampler, setup.test_prompts, reward=setup.reward)
        record |= reward_fields(name, list(result.rewards.values()))
    append_jsonl(folder.evals, record)
    return Evaluated(step, record)


def finish(setup: Setup, roles: Roles, folder: RunFolder) -> Iterator[Event]:
    """Export, check the export against the engine, write report and curve."""
    difference = export_policy(
        roles.trainer,
        roles.sampler,
        folder.export,
        prompts=setup.test_prompts,
        seed=setup.config.seed,
    )
    yield Saved(f"export (transformers agrees to {difference:.0e})", folder.export)
    yield Saved("report", write_report(folder))
    yield Saved("curve", folder.curve)
