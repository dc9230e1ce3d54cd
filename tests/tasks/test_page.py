"""The page about tasks and rewards: its examples run, and its tables are those of the code."""

import re
import sys
from pathlib import Path

import pytest

from shardloop.cli.main import main
from shardloop.controller.environments import ANSWER_TIMEOUT_S
from shardloop.rewards import MOST, REWARDS, load_reward, score
from shardloop.tasks import TASKS, env_maker, load_task
from shardloop.tasks.base import TEST_ONE_IN, FiniteTask
from shardloop.tasks.jsonl import FIELDS
from shardloop.types import Prompt

PAGE = Path(__file__).parents[2] / "docs" / "tasks-and-rewards.md"
TEXT = PAGE.read_text(encoding="utf-8")


def block(language: str, *, having: str = "") -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if having in block]
    return found


def commands() -> list[list[str]]:
    """The arguments of each `shardloop` line of the page that names this page's own files."""
    fences = re.findall(r"^```bash\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    return [line.split()[1:] for fence in fences for line in fence.splitlines()]


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_its_commands_are_accepted_as_printed(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("questions.jsonl").write_text(block("json"))
    Path("checks.py").write_text(block("python", having="def reward("))
    Path("games.py").write_text(block("python", having="class Guess"))
    for name in ("checks", "games"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert main([*arguments, "--check"]) == 0


def first_column(header: str) -> list[str]:
    table = TEXT[TEXT.index(f"| {header} |") :].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE)


def test_its_file_is_a_task_and_its_function_judges_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nonexistent"])
    Path("questions.jsonl").write_text(block("json"))
    Path("page_checks.py").write_text(block("python", having="def reward("))
    task = load_task("questions.jsonl")
    assert isinstance(task, FiniteTask)
    assert (len(task.train), len(task.test), task.default_reward) == (2, 1, "exact")
    judged = score(load_reward("page_checks:reward"), task.train[0], "4", finished=True)
    assert judged.value == pytest.approx(1.099)
    assert judged.parts == {"right": 1.0, "brief": 0.99}


def test_its_environment_is_a_task_that_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nonexistent"])
    Path("page_games.py").write_text(block("python", having="class Guess"))
    task = load_task("page_games:task")
    prompt = Prompt(uid="guess/42", text="0 to 99\n", answer=42)
    assert prompt in task.prompts("train", seed=0, start=0, count=50)
    env = env_maker(task)(prompt)
    assert env is not None and env.reset() == ""
    seen = [env.step(text) for text in ("7>", "x>", "50>", "42>")]
    assert [(s.text, s.reward, s.done) for s in seen] == [
        (" more\n", 0.0, False),
        (" no number\n", -0.1, False),
        (" less\n", 0.0, False),
        (" yes\n", 1.0, True),
    ]
    assert score(load_reward(task.default_reward), prompt, "42", finished=True).value == 0.0
    assert f"within {ANSWER_TIMEOUT_S:g} seconds" in TEXT


def test_its_tables_name_what_there_is() -> None:
    assert first_column("field |") == [*FIELDS[:3], "split", "uid"]
    assert first_column("name") == list(REWARDS)
    assert all(f"`{name}`" in TEXT for name in TASKS)
    assert f"1 prompt in {TEST_ONE_IN} is held out" in TEXT
    assert f"within ±{MOST:.0e}".replace("e+0", "e") in TEXT
