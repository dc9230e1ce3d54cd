"""A whole GRPO run: model, workers, warm start, loop, evaluation, checkpoints, export, report.

Floor 4. Called by the command line and by notebooks.

    resolve ─▶ start workers ─▶ [SFT] ─▶ evaluate ─▶ GRPO steps ─▶ evaluate ─▶ export ─▶ report
       │                          │                     │   ▲
       └─ refuses bad input       └─ start/             └───┘ evaluate, checkpoint, stop on request
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardloop.builtin import model_folder, temporary_model_folder
from shardloop.checkpoint import latest_checkpoint
from shardloop.config import TrainConfig
from shardloop.controller.describe import describe
from shardloop.controller.engines import Engines
from shardloop.controller.events import Event, Note
from shardloop.controller.groups import LocalWorkers
from shardloop.controller.manifest import changed_settings, write_manifest
from shardloop.controller.roles import build_engine, build_sync, build_trainer
from shardloop.controller.rundir import RunFolder
from shardloop.controller.setup import Setup, resolve
from shardloop.controller.sft import warm_start
from shardloop.controller.stages import ResumePoint, Roles, finish, run_loop
from shardloop.errors import UsageError
from shardloop.metrics import writing


def check(config: TrainConfig, root: Path, *, resume: bool = False) -> str:
    """The resolved run in the folder `root` as text; nothing is started, nothing left behind.

    Errors as `train` before its workers start.
    """
    if resume:
        resume_point(config, RunFolder(root))
    with temporary_model_folder(config.model, seed=config.seed) as model_dir:
        setup = resolve(config, model_dir)
    return describe(setup, root=root)


def train(
    config: TrainConfig,
    folder: RunFolder,
    *,
    resume: bool = False,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Generator[Event, None, None]:
    """Carries out a run in `folder` and tells what happens; closing the iterator stops the workers.

    Args:
        folder: new or empty; a run that fails before it has anything to go on from removes it.
        resume: go on with the run in the folder, from its newest checkpoint if it has one.
        stop_requested: asked after every step; True saves a checkpoint and ends the run.
    Raises:
        Interrupted: `stop_requested` became true. CheckpointError: `folder` cannot be written, or
            what lies there is damaged.
        UsageError: a bad setting, a `folder` in use, or a `config` that the run cannot resume with.
        Any other ShardloopError: see `errors`.
    """
    began = time.monotonic()
    if not resume:
        folder.demand_new()
    with folder.locked(), nullcontext() if resume else folder.removed_if_barren():
        point = resume_point(config, folder) if resume else None
        notes: list[str] = []
        with writing(folder.root):
            model_dir = model_folder(config.model, folder.root, seed=config.seed, say=notes.append)
        setup = resolve(config, model_dir)
        yield from (Note(text) for text in (*notes, describe(setup, root=folder.root)))
        if point is None:
            write_manifest(folder.manifest, config, facts(setup))
        yield Note(f"starting {setup.placement.world_size} worker processes")
        with start_workers(setup) as workers:
            yield from make_start(setup, workers, folder, stop_requested=stop_requested)
            if folder.has_start():
                setup = replace(setup, model_dir=folder.start)
            roles = spawn(workers, setup)
            yield from run_loop(
                setup, roles, folder, point=point, began=began, stop_requested=stop_requested
            )
            yield from finish(setup, roles, folder)


def resume_point(config: TrainConfig, folder: RunFolder) -> ResumePoint:
    """Reads only.

    Raises:
        UsageError: no run there, settings that make it another run, or fewer steps than it has.
    """
    changes = changed_settings(folder.read_config(), config)
    newest = latest_checkpoint(folder.checkpoints)
    done = int(newest.name.removeprefix("step-")) if newest is not None else 0
    if config.steps < done:
        raise UsageError(
            f"steps={config.steps}, but {folder.root} is already at step {done}; "
            f"choose --steps {done} or more"
        )
    return ResumePoint(checkpoint=newest, changes=changes)


def facts(setup: Setup) -> dict[str, Any]:
    """What the manifest tells besides the settings."""
    return {
        "model": str(setup.model_dir),
        "reward": setup.reward_name,
        "plan": setup.proof.plan.summary(),
    }


def start_workers(setup: Setup) -> LocalWorkers:
    everyone = range(setup.placement.world_size)
    return LocalWorkers({**setup.placement.roles(), "sync": everyone}, setup.config.workers)


def make_start(
    setup: Setup,
    workers: LocalWorkers,
    folder: RunFolder,
    *,
    stop_requested: Callable[[], bool],
) -> Iterator[Event]:
    """The supervised steps, where the run has some and has not made them yet."""
    config = setup.config
    if config.sft.steps and not folder.has_start():
        yield from warm_start(
            workers,
            task=setup.task,
            tokenizer=setup.tokenizer,
            model_dir=setup.model_dir,
            context_length=setup.model.context_length,
            trainer=config.trainer,
            sft=config.sft,
            seed=config.seed,
            start=folder.start,
            stop_requested=stop_requested,
        )


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
        zero_gap=config.zero_gap,
        role="trainer",
    )
    group = workers.spawn(
        "engine",
        build_engine,
        config.engine,
        setup.model.hf_config,
        tokenizer_from=setup.model_dir if setup.sampling.stop else None,
        zero_gap=config.zero_gap,
        role="engine",
    )
    engine = Engines(group, num_replicas=setup.placement.num_replicas)
    sync = workers.spawn("sync", build_sync, config, setup.proof, role="sync")
    return Roles(trainer=trainer, sampler=setup.sampler(engine), sync=sync)
