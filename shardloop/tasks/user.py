"""A task of the user's, whose every answer is checked. Floor 1; made by `tasks.load_task`.

Whatever it does wrong is a TaskError that names it: a task is the user's code, and is met first
long before a process starts, but also in the midst of a run.
"""

from collections.abc import Callable, Sequence
from typing import Any

from shardloop.errors import TaskError, UsageError
from shardloop.types import Env, Prompt, Split, Task
from shardloop.usercode import import_named, shown, told

PARTS = ("name", "stop_text", "default_reward", "prompts")


class UserTask:
    """`shardloop.types.Task` over a task of the user's."""

    def __init__(self, task: Task, where: str) -> None:
        """
        Args:
            where: what messages call it.
        Raises:
            TaskError: it lacks something, or has something of another type.
        """
        lacking = [part for part in PARTS if not hasattr(task, part)]
        if lacking:
            raise TaskError(
                f"{where} returned {shown(task)} without {', '.join(lacking)};"
                " return a shardloop.tasks.FiniteTask, or anything with its members"
            )
        self._task, self._where = task, where
        self.name: str = _text(task.name, "name", where)
        self.default_reward: str = _text(task.default_reward, "default_reward", where)
        text = task.stop_text
        self.stop_text: str | None = None if text is None else _text(text, "stop_text", where)
        self.env: Callable[[Prompt], Env | None] | None = getattr(task, "env", None)
        if self.env is not None and not callable(self.env):
            raise TaskError(
                f"{where}: env is a {type(self.env).__name__}; it must be a function that takes a"
                " prompt and returns an environment, or None"
            )
        self.train: Sequence[Any] = getattr(task, "train", ())
        """Its questions, where they can be counted."""

    def prompts(self, split: Split, *, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """As `Task.prompts`.

        Raises:
            TaskError: the task raised, or returned anything else than `count` prompts.
        """
        try:
            prompts = list(self._task.prompts(split, seed=seed, start=start, count=count))
        except (TaskError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the user's method may raise anything
            raise TaskError(
                f"{self._where}: making prompts of the {split} split raised {told(error)}"
            ) from error
        for prompt in prompts:
            if not isinstance(prompt, Prompt):
                raise TaskError(f"{self._where} gave {shown(prompt)}; it must be a Prompt")
        if len(prompts) != count:
            raise TaskError(
                f"{self._where} gave {len(prompts)} prompts of the {split} split when asked for"
                f" {count}; a stream begins anew when its questions are through"
            )
        return prompts


def user_task(name: str) -> UserTask:
    """The task that the function `package.module:function` returns.

    Raises:
        UsageError: there is no such function. TaskError: it returned no task.
    """
    where, function = f"task={name!r}", import_named(name, setting="task")
    if not callable(function):
        raise UsageError(f"{where} is a {type(function).__name__}, not a function")
    try:
        return UserTask(function(), where)
    except (TaskError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's function may raise anything
        raise TaskError(f"{where} raised {told(error)}") from error


def _text(value: object, part: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise TaskError(f"{where}: {part} is {shown(value)}; it must be text, and not empty")
    return value
