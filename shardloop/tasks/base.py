"""What tasks share: the train/test split, the order of a stream, evaluation prompts. Floor 1.

Called by the tasks beside it, by the loop (streams) and by `controller.setup` and `shardloop eval`
(evaluation prompts, stop tokens, environments).

A stream is counter-based: position `i` of `(split, seed)` is a pure function of those three, so a
resumed run needs no saved generator. One pass over the questions of a split is a keyed permutation
of them: no question comes twice before every question came once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

from shardloop.errors import ModelError, TaskError
from shardloop.types import Env, Prompt, Split, Task, Tokenizer

TEST_ONE_IN = 10
FEISTEL_ROUNDS = 4
MIN_STRETCH = 64

Q = TypeVar("Q")
"""What a task makes a prompt from: a number, a pair, a line of a file."""


def stable_hash(*parts: object) -> int:
    """64-bit hash of the parts' text: equal in every process and on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


def split_of(question: str) -> Split:
    """The side a question belongs to, by its text alone: 1 in 10 is held out."""
    return "test" if stable_hash("split", question) % TEST_ONE_IN == 0 else "train"


def shuffled(size: int, position: int, *, key: str) -> int:
    """Entry `position` of a permutation of range(size) that only `key` decides.

    A Feistel network permutes the next power of four; walking along a cycle until it comes back
    below `size` makes it a permutation of the range itself. Costs O(1), whatever the size.
    """
    assert 0 <= position < size, f"position={position} is outside range({size})"
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    value = position
    while True:
        left, right = value >> half_bits, value & mask
        for turn in range(FEISTEL_ROUNDS):
            left, right = right, left ^ (stable_hash(key, turn, right) & mask)
        value = left << half_bits | right
        if value < size:
            return value


@dataclass(kw_only=True)
class FiniteTask(Generic[Q]):
    """A task whose questions can all be counted: the stream shuffles them anew in each pass."""

    name: str
    default_reward: str
    train: Sequence[Q]
    test: Sequence[Q]
    to_prompt: Callable[[Q], Prompt]
    stop_text: str | None = None
    env: Callable[[Prompt], Env | None] | None = None
    """Makes the environment of one sample; None where answers have a single turn."""

    def prompts(self, split: Split, *, seed: int, start: int, count: int) -> Sequence[Prompt]:
        questions = self.test if split == "test" else self.train
        if len(questions) == 0:
            raise TaskError(f"task {self.name}: the {split} split has no prompts")
        size = len(questions)
        chosen = []
        for index in range(start, start + count):
            turn, position = divmod(index, size)
            place = shuffled(size, position, key=f"{self.name}/{split}/{seed}/{turn}")
            chosen.append(self.to_prompt(questions[place]))
        return chosen


def evaluation_prompts(task: Task, *, count: int, seed: int = 0) -> list[Prompt]:
    """The first `count` distinct held-out questions, the same ones at every call.

    Fewer where the task has fewer: it ends when a whole stretch of the stream brings nothing new.
    """
    stretch = max(count, MIN_STRETCH)
    distinct: dict[str, Prompt] = {}
    start = 0
    num_before = -1
    while num_before < len(distinct) < count:
        num_before = len(distinct)
        for prompt in task.prompts("test", seed=seed, start=start, count=stretch):
            distinct.setdefault(prompt.uid, prompt)
        start += stretch
    return list(distinct.values())[:count]


def env_maker(task: Task) -> Callable[[Prompt], Env | None]:
    """What makes the environment of each sample of a task; always None where it has none."""
    maker: Callable[[Prompt], Env | None] | None = getattr(task, "env", None)
    return no_env if maker is None else maker


def no_env(prompt: Prompt) -> None:
    """The maker of a task whose answers have a single turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """What ends an answer, as an engine is told."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...] = ()
    """Those that are not one token; an engine needs a tokenizer to find them."""


def stops_of(task: Task, tokenizer: Tokenizer) -> Stops:
    """The tokenizer's stop tokens and, where the task ends an answer by a text, that text: as a
    token, if it is one.

    Raises:
        ModelError: there are none.
    """
    text = task.stop_text
    if text is None:
        if not tokenizer.stop_token_ids:
            raise ModelError(
                f"task {task.name}: nothing would end an answer, since the model has no "
                "end-of-sequence token; set eos_token_id in config.json or generation_config.json"
            )
        return Stops(token_ids=tokenizer.stop_token_ids)
    ids = tokenizer.encode(text)
    if len(ids) != 1:
        return Stops(token_ids=tokenizer.stop_token_ids, texts=(text,))
    return Stops(token_ids=tuple(dict.fromkeys((*tokenizer.stop_token_ids, ids[0]))))
