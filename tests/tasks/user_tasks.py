"""Tasks as a user may give them by import path, most of them wrong."""

from collections.abc import Sequence
from typing import Any

from shardloop.tasks import FiniteTask
from shardloop.types import Observation, Prompt, Split

TEXT = "no function"


def single() -> FiniteTask[str]:
    return FiniteTask(
        name="single",
        default_reward="exact",
        train=["a"],
        test=["b"],
        to_prompt=lambda text: Prompt(uid=text, text=text, answer=text),
    )


def changed(**parts: Any) -> FiniteTask[str]:
    task = single()
    for name, value in parts.items():
        setattr(task, name, value)
    return task


def odd_env() -> FiniteTask[str]:
    return changed(env="env")


def odd_stop() -> FiniteTask[str]:
    return changed(stop_text="")


def odd_reward() -> FiniteTask[str]:
    return changed(default_reward=None)


def raising_prompts() -> FiniteTask[str]:
    return changed(to_prompt=lambda text: 1 / 0)


def no_prompts() -> FiniteTask[str]:
    return changed(to_prompt=str)


class Short:
    name, default_reward, stop_text = "short", "exact", None

    def prompts(self, split: Split, *, seed: int, start: int, count: int) -> Sequence[Prompt]:
        return [Prompt(uid="a", text="a")]


def short() -> Short:
    return Short()


def nothing() -> None:
    return None


def raises() -> None:
    raise KeyError("k")


class Dividing:
    """Fails at an empty turn."""

    def reset(self) -> str:
        return ""

    def step(self, text: str) -> Observation:
        return Observation(text="", reward=1.0 / len(text), done=True)


def dividing() -> FiniteTask[str]:
    return changed(env=lambda prompt: Dividing())


SHARED = Dividing()


def sharing() -> FiniteTask[str]:
    return changed(env=lambda prompt: SHARED)
