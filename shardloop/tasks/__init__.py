"""Streams of questions with train and test sides that share none. Floor 1.

`load_task` is called by `controller.setup`, `controller.sft` and `shardloop eval`; a task is
anything with the members of `shardloop.types.Task`.
"""

import difflib
from collections.abc import Callable
from pathlib import Path

from shardloop.errors import UsageError
from shardloop.tasks.addition import addition_task
from shardloop.tasks.base import (
    FiniteTask,
    Stops,
    env_maker,
    evaluation_prompts,
    no_env,
    stops_of,
)
from shardloop.tasks.calculator import calculator_task
from shardloop.tasks.countdown import countdown_task
from shardloop.tasks.gym import gym_task
from shardloop.tasks.jsonl import jsonl_task
from shardloop.tasks.sort import sort_task
from shardloop.tasks.user import UserTask, user_task
from shardloop.types import Task

__all__ = [
    "TASKS",
    "FiniteTask",
    "Stops",
    "UserTask",
    "env_maker",
    "evaluation_prompts",
    "load_task",
    "no_env",
    "stops_of",
]

TASKS: dict[str, Callable[[], Task]] = {
    "sort": sort_task,
    "addition": addition_task,
    "countdown": countdown_task,
    "calculator": calculator_task,
}


def load_task(name: str) -> Task:
    """A built-in task by name, a reasoning-gym generator as `gym:NAME`, the task in a file, or
    yours as `package.module:function` (which returns it).

    Raises:
        UsageError: no such task, file, generator or function, or an extra is missing.
        TaskError: the file's prompts cannot be used, or the function returned no task.
    """
    if name in TASKS:
        return TASKS[name]()
    if name.startswith("gym:"):
        return gym_task(name.removeprefix("gym:"))
    if name.endswith(".jsonl"):
        return jsonl_task(Path(name))
    if ":" in name:
        return user_task(name)
    near = difflib.get_close_matches(name, TASKS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(
        f"task={name!r} is unknown; choose {', '.join(TASKS)}, gym:NAME,"
        f" package.module:function or a path ending in .jsonl{hint}"
    )
