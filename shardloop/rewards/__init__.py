"""Functions that judge completions, by name or by import path. Floor 1.

`load_reward` is called by `controller.setup` and `shardloop eval`, `score` by `controller.scoring`,
`finite_number` also by `controller.environments`.
"""

import difflib
import inspect
import math
from collections.abc import Mapping

from shardloop.errors import RewardError, TaskError, UsageError
from shardloop.rewards.countdown import countdown_reward
from shardloop.rewards.env import env_reward
from shardloop.rewards.exact import exact_reward, final_reward, line_reward, number_reward
from shardloop.rewards.gym import gym_reward
from shardloop.rewards.mathematics import math_reward
from shardloop.types import Prompt, Reward, RewardFn, Task
from shardloop.usercode import import_named, shown, told

__all__ = [
    "MOST",
    "REWARDS",
    "SIGNATURE",
    "check_answer",
    "finite_number",
    "load_reward",
    "score",
]

MOST = 1e9
"""Rewards beyond it, either way, are taken for a mistake: sums of their squares lose all else."""
SIGNATURE = "def reward(prompt, text, *, finished) -> float | Reward"

REWARDS: dict[str, RewardFn] = {
    "exact": exact_reward,
    "line": line_reward,
    "final": final_reward,
    "number": number_reward,
    "countdown": countdown_reward,
    "math": math_reward,
    "gym": gym_reward,
    "env": env_reward,
}


def load_reward(name: str, *, task: Task | None = None) -> RewardFn:
    """A named reward, or yours as `package.module:function`.

    Modules are looked up as `python -m` does: in the working directory too. With `task`, also
    checks that the generators' own scorer is not asked to judge another task.

    Raises:
        UsageError: no such name, module or function; the module fails to import; it is no function,
            or one of other parameters; it cannot judge the task.
    """
    if name in REWARDS:
        if name == "gym" and task is not None and task.default_reward != "gym":
            raise UsageError(
                f"reward=gym judges gym:NAME tasks only, not {task.name}; leave the reward out for"
                f" the task's own ({task.default_reward})"
            )
        return REWARDS[name]
    _, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            f"reward={name!r} is unknown; choose {', '.join(REWARDS)},"
            f" or package.module:function{hint}"
        )
    function: RewardFn = import_named(name, setting="reward")
    if not callable(function):
        raise UsageError(
            f"reward={name!r}: {attribute} is a {type(function).__name__}, not a function"
        )
    _check_signature(name, function)
    return function


def _check_signature(name: str, function: RewardFn) -> None:
    """Whether it can be called as a reward is; what Python cannot tell is met at the first call."""
    if inspect.iscoroutinefunction(function):
        raise UsageError(f"reward={name!r} is async; write it as {SIGNATURE}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(None, "", finished=True)
    except TypeError as error:
        raise UsageError(
            f"reward={name!r} has the parameters {signature} ({error}); write it as {SIGNATURE}"
        ) from error


def check_answer(reward: RewardFn, prompt: Prompt) -> None:
    """Whether a reward of ours can judge this prompt, before a completion is there to judge.

    Raises:
        TaskError: the prompt's answer is of a kind that the reward cannot use.
    """
    try:
        reward(prompt, "", finished=False)
    except RewardError as error:
        raise TaskError(str(error)) from error


def score(reward: RewardFn, prompt: Prompt, text: str, *, finished: bool) -> Reward:
    """Calls `reward` and checks what it returns.

    Raises:
        RewardError: it raised, or called sys.exit; or it returned something that is no finite
            number of at most `MOST`, or a Reward with parts that are none. Text that reads as a
            number is none: a score never comes out of text.
        UsageError: as raised by the reward itself (a missing extra).
    """
    try:
        result = reward(prompt, text, finished=finished)
    except (RewardError, UsageError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a reward is the user's code and may raise anything
        raise RewardError(f"the reward raised on {prompt.named}: {told(error)}") from error
    if not isinstance(result, Reward):
        return Reward(value=finite_number(result, "the reward", prompt))
    if not isinstance(result.parts, Mapping):
        raise RewardError(
            f"parts of the reward are {shown(result.parts)} for {prompt.named};"
            " they must be a dict of numbers"
        )
    return Reward(
        value=finite_number(result.value, "the reward", prompt),
        parts={
            str(key): finite_number(part, f"part {key!r} of the reward", prompt)
            for key, part in result.parts.items()
        },
        text=str(result.text),
    )


def finite_number(value: object, what: str, prompt: Prompt) -> float:
    """`value` as a reward; `what` names it in a message.

    Raises:
        RewardError: it is no finite number of at most `MOST`, or it is text.
    """
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except Exception:  # a value of the user's class may raise anything
        number = math.nan
    if not abs(number) <= MOST:
        raise RewardError(
            f"{what} is {shown(value)} for {prompt.named}; it must be a finite number"
            f" within ±{MOST:.0e}, or a Reward of such numbers"
        )
    return number
