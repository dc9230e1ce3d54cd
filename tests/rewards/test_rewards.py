"""Rewards: text is compared or parsed, never evaluated; what comes out is a finite number."""

import builtins
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardloop.errors import RewardError, UsageError
from shardloop.rewards import REWARDS, load_reward, score
from shardloop.tasks import load_task
from shardloop.types import Prompt, Reward


def prompt(answer: Any) -> Prompt:
    return Prompt(uid="q", text="q", answer=answer)


COUNTDOWN = {"numbers": [3, 5, 2], "target": 16}


@pytest.mark.parametrize(
    ("name", "answer", "text", "finished", "expected"),
    [
        ("exact", "013", "013", True, 1),
        ("exact", "013", "013", False, 0),
        ("exact", "013", "0134", True, 0),
        ("exact", "013", " 013", True, 0),
        ("line", "12", "12", True, 1),
        ("line", "12", "12\n3+", False, 1),
        ("line", "12", "12", False, 0),
        ("line", "12", "1\n12", True, 0),
        ("line", "12", "123\n", True, 0),
        ("number", 12, "it is 12.", True, 1),
        ("number", 12, "it is 12", False, 0),
        ("number", 12, "12 or 13", True, 0),
        ("number", "-3", "x = -3", True, 1),
        ("number", 3, "10-7=3", True, 1),
        ("number", 3, "10-3", True, 1),
        ("number", 1000, "$1,000.00", True, 1),
        ("number", 0.5, "0.50", True, 1),
        ("number", 5, "3,5", True, 1),
        ("number", 12, "none", True, 0),
        ("number", 2, "٢", True, 0),
        ("countdown", COUNTDOWN, "(3+5)*2", True, 1),
        ("countdown", COUNTDOWN, "2*(5 + 3)", True, 1),
        ("countdown", COUNTDOWN, "(3+5)*2", False, 0),
        ("countdown", COUNTDOWN, "3+5*2", True, 0),
        ("countdown", COUNTDOWN, "(3+5)*2*1", True, 0),
        ("countdown", COUNTDOWN, "8*2", True, 0),
        ("countdown", COUNTDOWN, "16", True, 0),
        ("countdown", COUNTDOWN, "(3+5)*2=16", True, 0),
        ("countdown", COUNTDOWN, "3**5*2", True, 0),
        ("countdown", COUNTDOWN, "(3+5)*+2", True, 0),
        ("countdown", COUNTDOWN, "(3+5)(2)", True, 0),
        ("countdown", COUNTDOWN, "3/(5-5)", True, 0),
        ("countdown", COUNTDOWN, "((((", True, 0),
        ("countdown", COUNTDOWN, "", True, 0),
        ("countdown", COUNTDOWN, "(" * 60 + "3", True, 0),
        ("countdown", {"numbers": [1, 3, 6], "target": 18}, "6/(1/3)", True, 1),
        ("countdown", {"numbers": [1, 2, 3], "target": 1.5}, "1*3/2", True, 1),
    ],
)
def test_reward_of_known_answers(
    name: str, answer: Any, text: str, finished: bool, expected: int
) -> None:
    assert load_reward(name)(prompt(answer), text, finished=finished) == expected


ATTACKS = (
    "__import__('os').system('touch hacked')",
    'exec(\'open("hacked", "w")\')',
    "(lambda: 8 + 8)()",
    "9**9**9**9",
    "3\x00+5",
    "[3+5][0]*2",
    "3if 5else 2",
    "1_6",
    "0x10",
)


@pytest.mark.parametrize("name", ["exact", "line", "number", "countdown"])
@pytest.mark.parametrize("text", ATTACKS)
def test_model_text_is_never_evaluated(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("evaluated")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "eval", forbidden)
    monkeypatch.setattr(builtins, "exec", forbidden)
    answer = COUNTDOWN if name == "countdown" else "16"
    assert load_reward(name)(prompt(answer), text, finished=True) == 0.0
    assert not os.listdir(tmp_path)


def test_a_long_expression_is_refused_before_it_is_parsed() -> None:
    ones = prompt({"numbers": [1] * 100_000, "target": 100_000})
    assert load_reward("countdown")(ones, "+".join("1" * 100_000), finished=True) == 0.0


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("name", "answer"), [("exact", 12), ("line", None), ("number", "none"), ("countdown", "16")]
)
def test_an_answer_of_the_wrong_kind_is_named_whatever_the_text(
    name: str, answer: Any, finished: bool
) -> None:
    with pytest.raises(
        RewardError, match=rf"reward {name}: prompt 'q' \('q'\) has answer={answer!r}"
    ):
        load_reward(name)(prompt(answer), "12", finished=finished)


def returning(value: Any) -> Any:
    return lambda prompt, text, *, finished: value


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, "1.0", b"1", None, [1.0], 1j, 10**400, 1e308, -1.1e9],
    ids=lambda value: str(value)[:8],
)
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: Reward(value=value)])
def test_a_reward_that_is_no_finite_number_of_sane_size_is_refused(wrap: Any, value: Any) -> None:
    with pytest.raises(RewardError, match=r"for prompt 'q' \('q'\); it must be a finite number"):
        score(returning(wrap(value)), prompt("a"), "text", finished=True)


@pytest.mark.parametrize("part", [math.nan, None, "0.5", 1e300])
def test_a_part_that_is_no_finite_number_is_named(part: Any) -> None:
    reward = Reward(value=1.0, parts={"format": 0.5, "length": part})
    with pytest.raises(RewardError, match=r"part 'length' of the reward is .* for prompt 'q'"):
        score(returning(reward), prompt("a"), "text", finished=True)
    with pytest.raises(RewardError, match=r"parts of the reward are \[0.5\] .* a dict of numbers"):
        score(returning(Reward(value=1.0, parts=[0.5])), prompt("a"), "text", finished=True)  # type: ignore[arg-type]


def test_a_value_that_cannot_be_shown_is_named_by_its_kind() -> None:
    with pytest.raises(RewardError, match="the reward is a int for prompt"):
        score(returning(10**5000), prompt("a"), "text", finished=True)


@pytest.mark.parametrize("value", [1, 0.25, True, np.float32(0.5), -1e9, Reward(value=2.0)])
def test_a_finite_reward_passes_through(value: Any) -> None:
    judged = score(returning(value), prompt("a"), "text", finished=True)
    assert judged.value == (value.value if isinstance(value, Reward) else float(value))


def test_parts_and_text_of_a_reward_are_kept() -> None:
    reward = Reward(value=1.5, parts={"format": 0.5}, text="well formed")
    assert score(returning(reward), prompt("a"), "text", finished=True) == reward


def test_an_exception_in_a_reward_names_the_prompt_and_keeps_its_cause() -> None:
    def broken(prompt: Prompt, text: str, *, finished: bool) -> float:
        raise KeyError("gold")

    with pytest.raises(RewardError, match=r"on prompt 'q' \('q'\): KeyError: 'gold'") as caught:
        score(broken, prompt("a"), "text", finished=True)
    assert isinstance(caught.value.__cause__, KeyError)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raising(error: BaseException) -> Any:
    def judge(prompt: Prompt, text: str, *, finished: bool) -> float:
        raise error

    return judge


@pytest.mark.parametrize("error", [SystemExit(0), GeneratorExit(), Unprintable()], ids=repr)
def test_nothing_that_a_reward_raises_passes_as_anything_else(error: BaseException) -> None:
    with pytest.raises(RewardError, match=f"on prompt 'q' .*: {type(error).__name__}"):
        score(raising(error), prompt("a"), "text", finished=True)


def test_an_interrupt_in_a_reward_stays_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        score(raising(KeyboardInterrupt()), prompt("a"), "text", finished=True)


def test_a_long_question_is_named_by_its_ends() -> None:
    asked = Prompt(uid="u", messages=({"role": "user", "content": "How " + "x" * 500 + " 7?"},))
    with pytest.raises(
        RewardError, match=r"prompt 'u' \('How x.* … x.* 7\?'\): KeyError"
    ) as caught:
        score(raising(KeyError("k")), asked, "text", finished=True)
    assert len(str(caught.value)) < 120


def test_a_reward_of_yours_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "LIMIT = 3\ndef judge(prompt, text, *, finished):\n    return len(text) / 4\n"
    (tmp_path / "my_checks_a.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nonexistent"])
    judge = load_reward("my_checks_a:judge")
    assert score(judge, prompt("a"), "ab", finished=True).value == 0.5
    with pytest.raises(UsageError, match=r"my_checks_a \(.*\) has no 'jugde'"):
        load_reward("my_checks_a:jugde")
    with pytest.raises(UsageError, match="LIMIT is a int, not a function"):
        load_reward("my_checks_a:LIMIT")


def test_a_module_that_cannot_be_imported_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_checks_b.py").write_text("import absent_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nonexistent"])
    with pytest.raises(UsageError, match="importing no_such_pack failed: ModuleNotFoundError"):
        load_reward("no_such_pack:judge")
    with pytest.raises(UsageError, match="No module named 'absent_dependency'"):
        load_reward("my_checks_b:judge")


def test_a_module_that_exits_while_it_is_imported_does_not_end_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_checks_c.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nonexistent"])
    with pytest.raises(UsageError, match="importing my_checks_c failed: SystemExit: 0"):
        load_reward("my_checks_c:judge")


WRONG = {
    "no_finished": "def no_finished(prompt, text): return 1",
    "one_more": "def one_more(prompt, text, gold, *, finished): return 1",
    "other_name": "def other_name(prompt, text, *, done): return 1",
    "awaited": "async def awaited(prompt, text, *, finished): return 1",
    "Judge": "class Judge:\n    def __call__(self, prompt, text, *, finished): return 1",
}
RIGHT = {
    "any_names": "def any_names(p, t, finished): return 1",
    "with_default": "def with_default(prompt, text, *, finished, scale=2): return 1",
    "catch_all": "def catch_all(*args, **kwargs): return 1",
    "judge": "class Made:\n    def __call__(self, p, t, *, finished): return 1\njudge = Made()",
    "max": "",
}


@pytest.mark.parametrize("name", [*WRONG, *RIGHT])
def test_a_function_of_other_parameters_is_refused_before_the_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_checks_d.py").write_text(
        "\n".join([*WRONG.values(), *RIGHT.values(), "max = max"])
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nonexistent"])
    monkeypatch.delitem(sys.modules, "my_checks_d", raising=False)
    if name in RIGHT:
        assert callable(load_reward(f"my_checks_d:{name}"))
        return
    with pytest.raises(UsageError, match=r"write it as def reward\(prompt, text, \*, finished\)"):
        load_reward(f"my_checks_d:{name}")


@pytest.mark.parametrize("name", ["my-checks:f", "checks:", ":f", "checks.py:f()", "a:b:c"])
def test_a_malformed_import_path_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"write package\.module:function"):
        load_reward(name)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match=r"reward='exat' is unknown; choose exact, .* mean exact\?"
    ):
        load_reward("exat")


def test_the_scorer_of_generators_judges_no_other_task() -> None:
    with pytest.raises(UsageError, match="reward=gym judges gym:NAME tasks only, not sort"):
        load_reward("gym", task=load_task("sort"))
    assert load_reward("exact", task=load_task("sort")) is REWARDS["exact"]


def test_mathematics_without_the_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(UsageError, match=r"reward math: .*pip install 'shardloop\[math\]'"):
        score(load_reward("math"), prompt("1"), "1", finished=True)


@pytest.mark.optional
@pytest.mark.parametrize(
    ("answer", "text", "finished", "expected"),
    [
        ("1/2", r"so \boxed{\frac{1}{2}}", True, 1),
        (r"\frac{1}{2}", "0.5", True, 1),
        ("42", "it is 43", True, 0),
        (42, "it is 42", True, 1),
        ("42", "it is 42", False, 0),
    ],
)
def test_mathematics_compares_values(answer: Any, text: str, finished: bool, expected: int) -> None:
    pytest.importorskip("math_verify")
    assert load_reward("math")(prompt(answer), text, finished=finished) == expected
