"""The page about tasks and rewards: its examples run, and its tables are those of the code."""

import re
from pathlib import Path

import pytest

from shardloop.rewards import MOST, REWARDS, load_reward, score
from shardloop.tasks import TASKS, load_task
from shardloop.tasks.base import TEST_ONE_IN, FiniteTask
from shardloop.tasks.jsonl import FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "tasks-and-rewards.md"
TEXT = PAGE.read_text(encoding="utf-8")


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    return found


def first_column(header: str) -> list[str]:
    table = TEXT[TEXT.index(f"| {header} |") :].split("\n\n")[0]
    return re.findall(r"^\| `(\w+)`", table, flags=re.MULTILINE)


def test_its_file_is_a_task_and_its_function_judges_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nonexistent"])
    Path("questions.jsonl").write_text(block("json"))
    Path("page_checks.py").write_text(block("python"))
    task = load_task("questions.jsonl")
    assert isinstance(task, FiniteTask)
    assert (len(task.train), len(task.test), task.default_reward) == (2, 1, "exact")
    judged = score(load_reward("page_checks:reward"), task.train[0], "4", finished=True)
    assert judged.value == pytest.approx(1.099)
    assert judged.parts == {"right": 1.0, "brief": 0.99}


def test_its_tables_name_what_there_is() -> None:
    assert first_column("field |") == [*FIELDS[:3], "split", "uid"]
    assert first_column("name") == list(REWARDS)
    assert all(f"`{name}`" in TEXT for name in TASKS)
    assert f"1 prompt in {TEST_ONE_IN} is held out" in TEXT
    assert f"within ±{MOST:.0e}".replace("e+0", "e") in TEXT
