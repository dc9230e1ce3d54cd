"""Sums of two digits after one worked example: `2+6=8\\n3+9=` is answered by `12`. Floor 1.

Made by `tasks.load_task`. A small pretrained model gets about half of them right without training,
so there is something to reinforce. `3+9` and `9+3` are one question asked twice: both stand on the
same side of the split.
"""

from functools import cache

from shardloop.tasks.base import FiniteTask, stable_hash
from shardloop.types import Prompt

EXAMPLE = (2, 6)
MIN_HELD_OUT = 25


@cache
def addition_task() -> FiniteTask[tuple[int, int]]:
    """The 100 ordered pairs of digits; about a quarter is held out, never the example's pair."""
    unordered = [(a, b) for a in range(10) for b in range(a, 10)]
    by_hash = sorted(unordered, key=lambda pair: stable_hash("addition", *pair))
    test: list[tuple[int, int]] = []
    train: list[tuple[int, int]] = []
    for pair in by_hash:
        held_out = len(test) < MIN_HELD_OUT and pair != EXAMPLE
        (test if held_out else train).extend(sorted({pair, pair[::-1]}))
    return FiniteTask(
        name="addition",
        default_reward="line",
        train=train,
        test=test,
        to_prompt=_prompt,
        stop_text="\n",
    )


def _prompt(pair: tuple[int, int]) -> Prompt:
    a, b = pair
    x, y = EXAMPLE
    answer = str(a + b)
    text = f"{x}+{y}={x + y}\n{a}+{b}="
    return Prompt(uid=f"addition/{a}+{b}", text=text, answer=answer, solution=answer)
