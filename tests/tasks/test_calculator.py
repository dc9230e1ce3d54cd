"""The calculator task: its questions, its solutions, and a calculator that computes and no more."""

import random

import pytest

from shardloop.errors import TaskError, UsageError
from shardloop.rewards import load_reward, score
from shardloop.tasks import env_maker, load_task, no_env
from shardloop.tasks.base import FiniteTask
from shardloop.tasks.calculator import REFUSED, Calculator, compute
from shardloop.tiny import CHARACTERS
from shardloop.types import Observation, Prompt


def everything() -> tuple[set[tuple[int, int, int, bool]], set[tuple[int, int, int, bool]]]:
    task = load_task("calculator")
    assert isinstance(task, FiniteTask)
    return set(task.train), set(task.test)


def test_both_ways_to_ask_stand_on_one_side_and_no_question_is_lost() -> None:
    train, test = everything()
    assert len(train) + len(test) == 90 * 8 * 90 * 2
    assert not {q[:3] for q in train} & {q[:3] for q in test}
    assert len(test) == pytest.approx((len(train) + len(test)) / 10, rel=0.03)


@pytest.mark.parametrize("split", ["train", "test"])
def test_solutions_that_call_are_what_the_calculator_says_and_earn_everything(split: str) -> None:
    task = load_task("calculator")
    reward = load_reward(task.default_reward, task=task)
    prompts = task.prompts(split, seed=1, start=0, count=400)  # type: ignore[arg-type]
    calling = [p for p in prompts if isinstance(p.solution, tuple)]
    assert 120 < len(calling) < 280, "about half of them"
    for prompt in calling:
        assert isinstance(prompt.solution, tuple)
        env = env_maker(task)(prompt)
        assert env is not None and env.reset() == ""
        *turns, final = prompt.solution[::2]
        assert [env.step(turn).text for turn in turns] == list(prompt.solution[1::2])
        assert env.step(final).done
        text = "".join(prompt.solution)
        assert set(text) <= set(CHARACTERS)
        assert score(reward, prompt, text, finished=True).value == 1.0
        assert score(reward, prompt, text, finished=False).value == 0.0
        assert score(reward, prompt, text[:-1], finished=True).value == 0.0
        assert score(reward, prompt, "".join(prompt.solution[:-1]), finished=True).value == 0.0


def test_answers_are_those_of_arithmetic() -> None:
    for prompt in load_task("calculator").prompts("train", seed=2, start=0, count=200):
        assert prompt.text is not None
        terms = prompt.text.removesuffix("=").split("+")
        numbers = [[int(n) for n in term.split("*")] for term in terms]
        assert int(prompt.answer) == sum(n[0] * n[1] if len(n) > 1 else n[0] for n in numbers)


def test_the_calculator_computes_one_operation(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        a, b = draw.randrange(10**6), draw.randrange(10**6)
        assert compute(f"{a}+{b}") == str(a + b)
        assert compute(f"{a}-{b}") == str(a - b)
        assert compute(f"{a}*{b}") == str(a * b)


@pytest.mark.parametrize(
    "call",
    [
        *("", "1", "1+", "+1", "1+2+3", "(1+2)", "1 + 2", "1+2\n", "1/0", "2**9", "-1+2", "1.5+1"),
        *("٣+٤", "1" * 10 + "+1", "__import__('os')"),
    ],
)
def test_a_call_that_is_no_operation_is_answered_not_evaluated(call: str) -> None:
    assert compute(call) == REFUSED
    seen = Calculator().step(call + ">")
    assert (seen.text, seen.reward, seen.done) == (f"{REFUSED}\n", 0.0, False)
    assert set(REFUSED) <= set(CHARACTERS)


def test_a_turn_that_is_no_call_ends_the_episode() -> None:
    for text in ("", "12", "1+2"):
        assert Calculator().step(text).done


@pytest.mark.parametrize("rest", ["", "\n", ">", "9>"])
def test_a_call_ends_where_its_stop_text_does_whatever_its_token_holds(rest: str) -> None:
    assert Calculator().step(f"37*4>{rest}") == Observation(text="148\n")


def test_a_task_of_yours_is_found_by_import_path() -> None:
    task = load_task("tests.tasks.user_tasks:single")
    assert task.prompts("test", seed=0, start=0, count=1) == [Prompt(uid="b", text="b", answer="b")]
    assert env_maker(task) is no_env


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("user_tasks:TEXT", UsageError, "is a str, not a function"),
        ("user_tasks:lost", UsageError, "has no 'lost'"),
        ("lost:task", UsageError, "importing tests.tasks.lost failed: ModuleNotFoundError"),
        ("user_tasks:nothing", TaskError, "returned None without name, stop_text"),
        ("user_tasks:raises", TaskError, "raised KeyError: 'k'"),
        ("user_tasks:odd_env", TaskError, "env is a str; it must be a function"),
        ("user_tasks:odd_stop", TaskError, "stop_text is ''; it must be text, and not empty"),
        ("user_tasks:odd_reward", TaskError, "default_reward is None; it must be text"),
    ],
)
def test_a_task_of_yours_that_is_none_is_refused(
    name: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        load_task(f"tests.tasks.{name}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising_prompts", "making prompts of the test split raised ZeroDivisionError"),
        ("no_prompts", "gave 'b'; it must be a Prompt"),
        ("short", "gave 1 prompts of the test split when asked for 2; a stream begins anew"),
    ],
)
def test_prompts_of_yours_that_are_none_are_refused_by_name(name: str, message: str) -> None:
    task = load_task(f"tests.tasks.user_tasks:{name}")
    with pytest.raises(TaskError, match=f"task='tests.tasks.user_tasks:{name}'.* {message}"):
        task.prompts("test", seed=0, start=0, count=2)
