"""Streams of questions with train and test sides that share none. Floor 1.

`load_task` is called by `controller.setup`, `controller.sft` and `shardloop eval`; a task is
anything with the members of `shardloop.types.Task`.
"""

import difflib
from collections.abc import Callable
from pathlib import Path

from shardloop.errors import UsageError
from shardloop.tasks.addition import addition_task
from shardloop.tasks.base import FiniteTask, evaluation_prompts, stop_token_ids
from shardloop.tasks.countdown import countdown_task
from shardloop.tasks.gym import gym_task
from shardloop.tasks.jsonl import jsonl_task
from shardloop.tasks.sort import sort_task
from shardloop.types import Task

__all__ = ["TASKS", "FiniteTask", "evaluation_prompts", "load_task", "stop_token_ids"]

TASKS: dict[str, Callable[[], Task]] = {
    "sort": sort_task,
    "addition": addition_task,
    "countdown": countdown_task,
}


def load_task(name: str) -> Task:
    """A built-in task by name, a reasoning-gym generator as `gym:NAME`, or the task in a file.

    Raises:
        UsageError: no such task, file or generator, or an extra is missing.
        TaskError: the file's prompts cannot be used.
    """
    if name in TASKS:
        return TASKS[name]()
    if name.startswith("gym:"):
        return gym_task(name.removeprefix("gym:"))
    if name.endswith(".jsonl"):
        return jsonl_task(Path(name))
    near = difflib.get_close_matches(name, TASKS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(
        f"task={name!r} is unknown; choose {', '.join(TASKS)}, gym:NAME,"
        f" or a path ending in .jsonl{hint}"
    )
