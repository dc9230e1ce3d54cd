"""Six digits to be sorted: `471093>` is answered by `013479`. Floor 1; made by `tasks.load_task`.

A million questions with one right answer each, learnt by the tiny model in seconds: the task of
quick runs.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from shardloop.tasks.base import TEST_ONE_IN, FiniteTask
from shardloop.types import Prompt

NUM_DIGITS = 6


@cache
def sort_task() -> FiniteTask[int]:
    """Questions are the numbers below 10**6, written with leading zeros; 1 in 10 is held out."""
    numbers = np.arange(10**NUM_DIGITS, dtype=np.uint64)
    held_out = _mixed(numbers) % np.uint64(TEST_ONE_IN) == 0
    return FiniteTask(
        name="sort",
        default_reward="exact",
        train=np.flatnonzero(~held_out),  # type: ignore[arg-type]
        test=np.flatnonzero(held_out),  # type: ignore[arg-type]
        to_prompt=_prompt,
    )


def _prompt(number: int) -> Prompt:
    digits = f"{number:0{NUM_DIGITS}d}"
    answer = "".join(sorted(digits))
    return Prompt(uid=f"sort/{digits}", text=f"{digits}>", answer=answer, solution=answer)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Splitmix64 of each integer: a million hashes of text would take seconds."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
