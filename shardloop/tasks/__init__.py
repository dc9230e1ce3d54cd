"""Streams of questions with train and test sides that share none. Floor 1.

`load_task` is called by `controller.run` and the command line; a task is anything with the methods
of `shardloop.types.Task`.
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


def load_task(name: str | Path) -> Task:
    """A built-in task by name, a reasoning-gym generator as `gym:NAME`, or the task in a file.

    Raises:
        UsageError: no such task, file or generator, or an extra is missing.
        TaskError: the file's prompts cannot be used.
    """
    text = str(name)
    if text in TASKS:
        return TASKS[text]()
    if text.startswith("gym:"):
        return gym_task(text.removeprefix("gym:"))
    if text.endswith(".jsonl"):
        return jsonl_task(Path(text))
    near = difflib.get_close_matches(text, TASKS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(
        f"task={text!r} is unknown; choose {', '.join(TASKS)}, gym:NAME,"
        f" or a path ending in .jsonl{hint}"
    )
