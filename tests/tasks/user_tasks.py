"""Tasks as a user may give them by import path, most of them wrong."""

from shardloop.tasks import FiniteTask
from shardloop.types import Prompt

TEXT = "no function"


def single() -> FiniteTask[str]:
    return FiniteTask(
        name="single",
        default_reward="exact",
        train=["a"],
        test=["b"],
        to_prompt=lambda text: Prompt(uid=text, text=text, answer=text),
    )


def odd_env() -> FiniteTask[str]:
    task = single()
    task.env = "env"  # type: ignore[assignment]
    return task


def nothing() -> None:
    return None


def raises() -> None:
    raise KeyError("k")
