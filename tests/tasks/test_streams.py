"""Laws of every stream: pure, random access, disjoint splits, distinct held-out questions."""

import random
import subprocess
import sys
from collections.abc import Sequence

import pytest

from shardloop.errors import TaskError
from shardloop.rewards import load_reward, score
from shardloop.tasks import evaluation_prompts, load_task, stops_of
from shardloop.tasks.base import FiniteTask, shuffled, split_of
from shardloop.types import Prompt, Split, Task

BUILT_IN = ("sort", "addition", "countdown", "calculator")
SPLITS: tuple[Split, Split] = ("train", "test")


def every_prompt(name: str, split: Split) -> list[Prompt]:
    """One pass over the questions of a side."""
    task = load_task(name)
    assert isinstance(task, FiniteTask)
    size = len(task.train if split == "train" else task.test)
    return list(task.prompts(split, seed=0, start=0, count=size))


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 100, 1000])
def test_shuffling_is_a_permutation_that_depends_on_its_key(size: int) -> None:
    first = [shuffled(size, i, key="a") for i in range(size)]
    assert sorted(first) == list(range(size))
    if size > 3:
        assert first != list(range(size))
        assert first != [shuffled(size, i, key="b") for i in range(size)]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("split", SPLITS)
def test_any_part_of_a_stream_is_the_same_as_in_one_piece(
    name: str, split: Split, seed: int
) -> None:
    task = load_task(name)
    whole = task.prompts(split, seed=5, start=0, count=300)
    draw = random.Random(seed)
    for _ in range(20):
        start = draw.randrange(300)
        count = draw.randrange(300 - start + 1)
        part = task.prompts(split, seed=5, start=start, count=count)
        assert list(part) == list(whole[start : start + count])
    assert task.prompts(split, seed=6, start=0, count=300) != whole


def test_a_stream_is_the_same_in_another_process() -> None:
    code = (
        "from shardloop.tasks import load_task;"
        "print([p.text for n in ('sort', 'addition', 'countdown', 'calculator')"
        " for p in load_task(n).prompts('train', seed=3, start=1000, count=5)])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    here = [
        p.text for n in BUILT_IN for p in load_task(n).prompts("train", seed=3, start=1000, count=5)
    ]
    assert out.stdout.strip() == repr(here)


@pytest.mark.parametrize("name", BUILT_IN)
def test_each_pass_asks_every_question_once_in_a_new_order(name: str) -> None:
    task = load_task(name)
    assert isinstance(task, FiniteTask)
    size = len(task.test)
    if size > 10_000:
        size = 2_000  # a part of the pass, of which no question may come twice
        uids = [p.uid for p in task.prompts("test", seed=1, start=0, count=size)]
        assert len(set(uids)) == size
        return
    first = [p.uid for p in task.prompts("test", seed=1, start=0, count=size)]
    second = [p.uid for p in task.prompts("test", seed=1, start=size, count=size)]
    assert len(set(first)) == size
    assert set(first) == set(second)
    assert first != second


def test_no_sort_question_is_on_both_sides_and_none_is_lost() -> None:
    task = load_task("sort")
    assert isinstance(task, FiniteTask)
    train, test = set(task.train.tolist()), set(task.test.tolist())  # type: ignore[attr-defined]
    assert train | test == set(range(10**6))
    assert not train & test
    assert len(test) == pytest.approx(10**5, rel=0.01)


@pytest.mark.parametrize("name", ["addition", "countdown"])
def test_questions_that_differ_in_order_only_are_on_one_side(name: str) -> None:
    def canonical(prompt: Prompt) -> object:
        assert prompt.text is not None
        question = prompt.text.split("\n")[-1].rstrip("=")
        head, _, target = question.partition(":")
        return tuple(sorted(head.replace("+", ",").split(","))), target

    train = {canonical(p) for p in every_prompt(name, "train")}
    test = {canonical(p) for p in every_prompt(name, "test")}
    assert not train & test


def test_addition_holds_out_a_quarter_and_never_the_example() -> None:
    train, test = every_prompt("addition", "train"), every_prompt("addition", "test")
    assert len(train) + len(test) == len({p.text for p in (*train, *test)}) == 100
    assert 24 <= len(test) <= 28
    assert not {"2+6=8\n2+6=", "2+6=8\n6+2="} & {p.text for p in test}


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_solution_earns_the_full_reward_of_its_task(name: str) -> None:
    task = load_task(name)
    reward = load_reward(task.default_reward, task=task)
    for split in SPLITS:
        for prompt in task.prompts(split, seed=2, start=0, count=800):
            assert prompt.solution is not None
            whole = "".join(prompt.solution)
            assert score(reward, prompt, whole, finished=True).value == 1.0, prompt
            assert score(reward, prompt, whole, finished=False).value == 0.0, prompt


def test_sort_and_addition_ask_what_they_say() -> None:
    for prompt in load_task("sort").prompts("train", seed=0, start=0, count=50):
        assert prompt.text is not None
        digits = prompt.text.removesuffix(">")
        assert len(digits) == 6 and list(prompt.answer) == sorted(digits)
    for prompt in every_prompt("addition", "train"):
        assert prompt.text is not None
        a, b = prompt.text.removeprefix("2+6=8\n").removesuffix("=").split("+")
        assert int(prompt.answer) == int(a) + int(b)


@pytest.mark.parametrize(("count", "expected"), [(10, 10), (26, 26), (256, 26)])
def test_evaluation_asks_distinct_questions_and_stops_when_there_are_no_more(
    count: int, expected: int
) -> None:
    prompts = evaluation_prompts(load_task("addition"), count=count)
    assert len(prompts) == len({p.uid for p in prompts}) == expected
    assert evaluation_prompts(load_task("addition"), count=count) == prompts


def test_the_same_text_always_falls_on_the_same_side() -> None:
    assert [split_of(q) for q in ("a", "b", "question 13")] == ["train", "train", "train"]
    held_out = sum(split_of(f"question {i}") == "test" for i in range(10_000))
    assert held_out == pytest.approx(1000, abs=150)


def test_a_split_without_prompts_is_an_error() -> None:
    task = FiniteTask(
        name="none",
        default_reward="exact",
        train=["a"],
        test=[],
        to_prompt=lambda text: Prompt(uid=text, text=text),
    )
    with pytest.raises(TaskError, match="task none: the test split has no prompts"):
        task.prompts("test", seed=0, start=0, count=1)


class LetterTokenizer:
    vocab_size = 256
    stop_token_ids: tuple[int, ...] = (2,)

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return self.encode(prompt.text or "")


def test_a_task_that_ends_answers_by_a_newline_stops_the_engine_there() -> None:
    by_newline = stops_of(load_task("addition"), LetterTokenizer())
    assert (by_newline.token_ids, by_newline.texts) == ((2, ord("\n")), ())
    assert stops_of(load_task("sort"), LetterTokenizer()).token_ids == (2,)


def test_a_text_of_several_tokens_stops_the_engine_as_a_text() -> None:
    two: Task = FiniteTask(
        name="two",
        default_reward="exact",
        train=["a"],
        test=["b"],
        to_prompt=lambda text: Prompt(uid=text, text=text),
        stop_text="##",
    )
    stops = stops_of(two, LetterTokenizer())
    assert (stops.token_ids, stops.texts) == ((2,), ("##",))
