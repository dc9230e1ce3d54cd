"""Supervised steps on a task's worked solutions, before GRPO or alone. Floor 4.

`warm_start` is called by `controller.run`, `fine_tune` by `shardloop sft`.
"""

import hashlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from shardloop import hf
from shardloop.builtin import temporary_model_folder
from shardloop.config import SFTConfig, TrainerConfig, WorkersConfig
from shardloop.controller.demands import demand_devices
from shardloop.controller.events import Event, Note, Progress, Saved
from shardloop.controller.groups import LocalWorkers, WorkerGroup
from shardloop.controller.roles import build_trainer, release
from shardloop.controller.rollouts import solution_row
from shardloop.controller.setup import read_model, trainer_layout
from shardloop.errors import Interrupted, UsageError
from shardloop.rl.batch import sft_batch
from shardloop.schedule import learning_rate
from shardloop.tasks import load_task
from shardloop.types import Task, Tokenizer


def fine_tune(
    model: str,
    task: str,
    out: Path,
    *,
    sft: SFTConfig,
    trainer: TrainerConfig,
    workers: WorkersConfig,
    seed: int,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Generator[Event, None, None]:
    """Supervised steps on ranks of a trainer alone; the result is the model folder `out`.

    Raises:
        Interrupted: `stop_requested` became true; nothing was written.
        UsageError: `out` exists, an unknown task, or too few GPUs. ModelError, LayoutError: as in a
            run. TaskError: as `sft_steps`. CheckpointError: `out` cannot be written.
    """
    if out.exists():
        raise UsageError(f"out={out} exists; choose a new folder")
    notes: list[str] = []
    with temporary_model_folder(model, seed=seed, say=notes.append) as model_dir:
        yield from map(Note, notes)
        facts = read_model(model_dir)
        layout = trainer_layout(facts.canonical, trainer)
        demand_devices(workers, num_ranks=layout.world_size)
        known_task, tokenizer = load_task(task), hf.load_tokenizer(model_dir)
        with LocalWorkers({"trainer": range(layout.world_size)}, workers) as processes:
            yield from warm_start(
                processes,
                task=known_task,
                tokenizer=tokenizer,
                model_dir=model_dir,
                context_length=facts.context_length,
                trainer=trainer,
                sft=sft,
                seed=seed,
                start=out,
                stop_requested=stop_requested,
            )


def warm_start(
    workers: LocalWorkers,
    *,
    task: Task,
    tokenizer: Tokenizer,
    model_dir: Path,
    context_length: int,
    trainer: TrainerConfig,
    sft: SFTConfig,
    seed: int,
    start: Path,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """Supervised steps from `model_dir`, on the ranks of the role "trainer"; the result is the
    folder `start`.

    Raises:
        Interrupted: `stop_requested` became true; nothing was written. TaskError: as `sft_steps`.
        CheckpointError: `start` cannot be written.
    """
    # It has its own optimizer and needs no reference policy.
    group = workers.spawn(
        "sft", build_trainer, trainer, sft.optim, model_dir, reference=False, role="trainer"
    )
    steps = sft_steps(
        group, task=task, tokenizer=tokenizer, context_length=context_length, config=sft, seed=seed
    )
    for metrics in steps:
        yield Progress("sft", metrics["step"], sft.steps, metrics)
        if stop_requested():
            raise Interrupted(
                f"stopped after SFT step {metrics['step']} of {sft.steps}; a supervised start is "
                "kept only when it is whole: give the same command to make it from its first step"
            )
    group.call("export", start)
    workers.run(release, "sft", role="trainer")
    yield Saved("warm start", start)


def sft_steps(
    trainer: WorkerGroup,
    *,
    task: Task,
    tokenizer: Tokenizer,
    context_length: int,
    config: SFTConfig,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Makes `config.steps` updates and yields the metrics of each. The loss is on the solution
    (but for an environment's part of it) and the stop token, as a mean over these tokens of the
    whole batch.

    Raises:
        TaskError: a prompt has no worked solution, or one that does not fit the context with it.
        UsageError: the tokenizer has no stop token.
    """
    for step in range(config.steps):
        prompts = task.prompts(
            "train",
            seed=stream_seed(seed, "sft"),
            start=step * config.batch_size,
            count=config.batch_size,
        )
        rows = [solution_row(prompt, tokenizer, context_length) for prompt in prompts]
        batch = sft_batch(
            [(row.prompt_ids, row.answer_ids) for row in rows],
            loss_masks=[row.loss_mask for row in rows],
        )
        metrics = trainer.call("forward_backward", batch, "sft", collect="sum")
        lr = learning_rate(step, config.steps, config.optim)
        update = trainer.call("step", lr, collect="same")
        yield {"step": step + 1, **metrics, **update, "lr": lr}


def stream_seed(seed: int, stream: str) -> int:
    """A seed of its own for each stream of a run, so that SFT and RL draw different prompts."""
    digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
