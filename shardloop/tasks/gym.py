"""Questions of the reasoning-gym generators, as `gym:NAME` (extra `shardloop[gym]`). Floor 1.

Made by `tasks.load_task`; judged by the generator's own scorer (`rewards.gym`). Questions are
natural language for instruction-tuned models, so a prompt is one user message.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardloop.errors import TaskError, UsageError, how_to_install
from shardloop.tasks.base import split_of, stable_hash
from shardloop.types import Prompt, Split

NUM_ENTRIES = 2**31 - 1
MAX_ATTEMPTS = 1000


@cache
def gym_dataset(generator: str) -> Any:
    """The endless dataset of a generator: entry `i` is the same in every process.

    Raises:
        UsageError: the extra is not installed, or there is no such generator.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ModuleNotFoundError as error:
        raise UsageError(f"task gym:{generator}: {error}; {how_to_install('gym')}") from error
    if generator not in DATASETS:
        near = difflib.get_close_matches(generator, DATASETS, n=5, cutoff=0.5)
        hint = (
            f"near it: {', '.join(near)}"
            if near
            else f"for example {', '.join(sorted(DATASETS)[:5])}"
        )
        raise UsageError(
            f"task gym:{generator}: no such reasoning-gym generator; {hint}"
            f" ({len(DATASETS)} in all)"
        )
    return reasoning_gym.create_dataset(generator, size=NUM_ENTRIES, seed=0)


@dataclass(kw_only=True)
class GymTask:
    name: str
    generator: str
    default_reward: str = "gym"
    stop_text: str | None = None

    def prompts(self, split: Split, *, seed: int, start: int, count: int) -> Sequence[Prompt]:
        return [self._prompt(split, seed, position) for position in range(start, start + count)]

    def _prompt(self, split: Split, seed: int, position: int) -> Prompt:
        """Draws entries by counter until one stands on the wanted side of the split."""
        dataset = gym_dataset(self.generator)
        for attempt in range(MAX_ATTEMPTS):
            index = stable_hash(self.name, split, seed, position, attempt) % NUM_ENTRIES
            question = dataset[index]["question"]
            if split_of(question) == split:
                return Prompt(
                    uid=f"{self.name}/{stable_hash(question):016x}",
                    messages=({"role": "user", "content": question},),
                    answer={"generator": self.generator, "index": index},
                )
        raise TaskError(
            f"task {self.name}: the {split} split has no prompts: too few distinct questions"
        )


def gym_task(generator: str) -> GymTask:
    """Raises: UsageError, as `gym_dataset`."""
    gym_dataset(generator)
    return GymTask(name=f"gym:{generator}", generator=generator)
