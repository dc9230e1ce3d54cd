"""What a run does once its ranks hold trainer and engine: steps, evaluations, checkpoints, end.

Floor 4. Called by `controller.run`.

A step is evaluated before its checkpoint is written, and what was recorded after the newest
checkpoint is made again: so a run that was killed anywhere and resumed records what an
uninterrupted one does.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardloop.config import TrainConfig
from shardloop.controller.checkpoints import Checkpoints
from shardloop.controller.evals import reward_fields
from shardloop.controller.events import Evaluated, Event, Note, Progress, Saved
from shardloop.controller.export import export_policy
from shardloop.controller.groups import WorkerGroup
from shardloop.controller.loop import evaluate, grpo_steps
from shardloop.controller.manifest import Changes, add_resumption
from shardloop.controller.report import write_report
from shardloop.controller.rollouts import Sampler
from shardloop.controller.rundir import RunFolder
from shardloop.controller.setup import Setup
from shardloop.controller.track import open_sink
from shardloop.errors import Interrupted
from shardloop.metrics import append_jsonl, read_jsonl

MANY_IDLE_STEPS = 10
"""Steps in a row without anything to learn from rewards after which the run says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The two halves of a run and what joins them."""

    trainer: WorkerGroup
    sampler: Sampler
    """Has the engines."""
    sync: WorkerGroup
    """On all ranks."""

    def update_engine(self) -> None:
        """The engine wakes and takes the trainer's present weights."""
        self.sampler.engine.take_weights(self.trainer, self.sync)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """Where an earlier run goes on, and with which other settings."""

    checkpoint: Path | None = None
    """None: from the start of RL."""
    changes: Changes = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopwatch:
    """Seconds of work on a run: of those processes before whose results are kept, and of this."""

    earlier_s: float
    began: float

    def elapsed_s(self) -> float:
        return self.earlier_s + time.monotonic() - self.began


def run_loop(
    setup: Setup,
    roles: Roles,
    folder: RunFolder,
    *,
    point: ResumePoint | None,
    began: float,
    stop_requested: Callable[[], bool],
) -> Iterator[Event]:
    """Evaluation, then GRPO steps with evaluations and checkpoints between them.

    `began` is when the run's work did, by `time.monotonic`.
    """
    config = setup.config
    start = take_up(roles, folder, point) if point is not None else 0
    if point is not None:
        yield Note(f"resumed at step {start} from {point.checkpoint or 'the start'}")
    watch = Stopwatch(earlier_s=_recorded_s(folder), began=began)
    if is_evaluated(config, start) and not _has_evaluation(folder, start):
        yield measure(setup, roles, folder, step=start, watch=watch)
    steps = grpo_steps(
        trainer=roles.trainer,
        sampler=roles.sampler,
        sync=roles.sync,
        task=setup.task,
        reward=setup.reward,
        config=config,
        start=start,
    )
    num_idle = 0
    checkpoints = Checkpoints(roles.trainer, folder.checkpoints, config.checkpoint)
    with closing(open_sink(config.track, folder.tensorboard)) as sink, checkpoints.completed():
        for step in steps:
            yield from checkpoints.news()
            metrics = {**step.metrics, **checkpoints.seconds(), "elapsed_s": watch.elapsed_s()}
            append_jsonl(folder.metrics, metrics)
            sink.write(step.number, metrics)
            yield Progress("train", step.number, config.steps, metrics)
            num_idle = num_idle + 1 if is_idle(metrics) else 0
            if num_idle == MANY_IDLE_STEPS:
                yield Note(no_signal(num_idle, updated=bool(metrics["update"])))
            is_last = step.number == config.steps
            stop = stop_requested() and not is_last
            if is_evaluated(config, step.number):
                yield measure(setup, roles, folder, step=step.number, watch=watch)
            if is_last or stop or _is_due(step.number, config.checkpoint.every):
                yield from checkpoints.save(step.number)
            if is_last or stop:
                yield from checkpoints.finish()
            if stop:
                raise Interrupted(
                    f"stopped after step {step.number} of {config.steps}; go on with "
                    f"`shardloop train --resume {folder.root}`"
                )


def take_up(roles: Roles, folder: RunFolder, point: ResumePoint) -> int:
    """Loads the checkpoint, then notes the resumption and forgets what was recorded after it.

    Returns:
        The step from which the run goes on.
    """
    start = 0
    if point.checkpoint is not None:
        start = roles.trainer.call("load", point.checkpoint, collect="first")["step"]
    folder.forget_after(start)
    add_resumption(folder.manifest, point.changes, from_step=start)
    return start


def is_idle(metrics: Mapping[str, Any]) -> bool:
    """Whether no reward moved the weights; a KL or entropy term may have."""
    return not metrics["update"] or metrics["zero_signal_fraction"] == 1.0


def no_signal(num_steps: int, *, updated: bool) -> str:
    what = "only the KL or entropy term moves the weights" if updated else "no update"
    return (
        f"{what} in {num_steps} steps: all samples of each prompt had equal rewards, so there "
        "is nothing to learn from. The task is too hard or too easy for the model, or the reward "
        "too coarse: try more samples for each prompt, a supervised start, or a graded reward"
    )


def is_evaluated(config: TrainConfig, step: int) -> bool:
    """Whether a run measures its policy after `step`."""
    return step in (0, config.steps) or _is_due(step, config.eval.every)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _has_evaluation(folder: RunFolder, step: int) -> bool:
    return any(record["step"] == step for record in read_jsonl(folder.evals))


def _recorded_s(folder: RunFolder) -> float:
    records = [*read_jsonl(folder.metrics), *read_jsonl(folder.evals)]
    return max((float(record.get("elapsed_s", 0.0)) for record in records), default=0.0)


def measure(
    setup: Setup, roles: Roles, folder: RunFolder, *, step: int, watch: Stopwatch
) -> Evaluated:
    """Greedy and sampled reward on the held-out prompts, with the trainer's present weights."""
    roles.update_engine()
    record: dict[str, Any] = {"step": step, "prompts": len(setup.test_prompts)}
    for name, sampler in (("greedy", roles.sampler.at(0.0)), ("sampled", roles.sampler)):
        result = evaluate(sampler, setup.test_prompts, reward=setup.reward)
        record |= reward_fields(name, list(result.rewards.values()))
    record["elapsed_s"] = watch.elapsed_s()
    append_jsonl(folder.evals, record)
    return Evaluated(step, record)


def finish(setup: Setup, roles: Roles, folder: RunFolder) -> Iterator[Event]:
    """Export, check the export against the engine, write report and curve."""
    roles.update_engine()  # a resumed run with no steps left has made none yet
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
