"""Functions that judge completions, by name or by import path. Floor 1.

`load_reward` is called by `controller.setup` and `shardloop eval`, `score` by `controller.scoring`.
"""

import difflib
import importlib
import math
import sys
from pathlib import Path

from shardloop.errors import RewardError, UsageError
from shardloop.rewards.countdown import countdown_reward
from shardloop.rewards.exact import exact_reward, line_reward, number_reward
from shardloop.rewards.gym import gym_reward
from shardloop.rewards.mathematics import math_reward
from shardloop.types import Prompt, Reward, RewardFn, Task

__all__ = ["REWARDS", "load_reward", "score"]

REWARDS: dict[str, RewardFn] = {
    "exact": exact_reward,
    "line": line_reward,
    "number": number_reward,
    "countdown": countdown_reward,
    "math": math_reward,
    "gym": gym_reward,
}


def load_reward(name: str, *, task: Task | None = None) -> RewardFn:
    """A named reward, or yours as `package.module:function`.

    Modules are looked up as `python -m` does: in the working directory too. With `task`, also
    checks that the generators' own scorer is not asked to judge another task.

    Raises:
        UsageError: no such name, module or function; the module fails to import; it is no function;
            it cannot judge the task.
    """
    if name in REWARDS:
        if name == "gym" and task is not None and task.default_reward != "gym":
            raise UsageError(
                f"reward=gym judges gym:NAME tasks only, not {task.name}; leave the reward out for"
                f" the task's own ({task.default_reward})"
            )
        return REWARDS[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"reward={name!r} is unknown; choose {', '.join(REWARDS)},"
            f" or package.module:function{hint}"
        )
    return _import_reward(name, module_name, attribute)


def _import_reward(name: str, module_name: str, attribute: str) -> RewardFn:
    if not attribute.isidentifier() or not all(p.isidentifier() for p in module_name.split(".")):
        raise UsageError(
            f"reward={name!r}: write package.module:function, as in mypack.checks:score"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise UsageError(
            f"reward={name!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        raise UsageError(f"reward={name!r}: {module_name} ({module.__file__}) has no {attribute!r}")
    function: RewardFn = getattr(module, attribute)
    if not callable(function):
        raise UsageError(
            f"reward={name!r}: {attribute} is a {type(function).__name__}, not a function"
        )
    return function


def score(reward: RewardFn, prompt: Prompt, text: str, *, finished: bool) -> Reward:
    """Calls `reward` and checks what it returns.

    Raises:
        RewardError: it raised, or returned something that is no finite number. Text that reads as a
            number is none: a score never comes out of text.
        UsageError: as raised by the reward itself (a missing extra).
    """
    try:
        result = reward(prompt, text, finished=finished)
    except (RewardError, UsageError):
        raise
    except Exception as error:  # a reward is the user's code and may raise anything
        raise RewardError(
            f"the reward raised on prompt {prompt.uid!r}: {type(error).__name__}: {error}"
        ) from error
    judged = result if isinstance(result, Reward) else Reward(value=_number(result, prompt))
    value = _number(judged.value, prompt)
    return Reward(value=value, parts=judged.parts, text=judged.text)


def _number(value: object, prompt: Prompt) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"the reward returned {value!r} for prompt {prompt.uid!r};"
            " it must be a finite number or a Reward"
        )
    return number
