"""A JSONL task: every fault names its file and line; questions keep to one side."""

import codecs
import json
from pathlib import Path
from typing import Any

import pytest

from shardloop.errors import TaskError, UsageError
from shardloop.tasks import load_task
from shardloop.tasks.base import FiniteTask


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "questions.jsonl"
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def numbered(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=", "answer": str(i + 1), **fields} for i in range(count)]


def load(path: Path) -> FiniteTask[Any]:
    task = load_task(str(path))
    assert isinstance(task, FiniteTask)
    return task


def test_fields_reach_the_prompt_unchanged(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hé?"}]
    path = write(
        tmp_path,
        {"prompt": "a", "answer": {"k": [1, None]}, "solution": "s", "split": "train", "uid": "u"},
        "",
        {"prompt": chat, "answer": "x", "split": "test"},
    )
    task = load(path)
    (train,), (test,) = task.train, task.test
    assert (train.text, train.answer, train.solution, train.uid) == (
        "a",
        {"k": [1, None]},
        "s",
        "u",
    )
    assert (test.messages, test.text, test.answer) == (tuple(chat), None, "x")


def test_without_split_the_prompt_alone_decides_the_side(tmp_path: Path) -> None:
    few, many = load(write(tmp_path, *numbered(100))), load(write(tmp_path, *numbered(300)))
    assert {p.uid for p in few.test} <= {p.uid for p in many.test}
    assert {p.uid for p in few.train} <= {p.uid for p in many.train}
    assert not {p.text for p in many.test} & {p.text for p in many.train}
    assert 15 <= len(many.test) <= 50


def test_a_repeated_question_stays_on_one_side_with_one_uid(tmp_path: Path) -> None:
    task = load(write(tmp_path, *numbered(60), *numbered(60)))
    assert len(task.train) + len(task.test) == 120
    assert not {p.uid for p in task.test} & {p.uid for p in task.train}


@pytest.mark.parametrize(("answer", "reward"), [("3", "exact"), (3, "number"), (2.5, "number")])
def test_the_default_reward_fits_the_answers(tmp_path: Path, answer: Any, reward: str) -> None:
    rows = [{"prompt": f"p{s}", "answer": answer, "split": s} for s in ("train", "test")]
    assert load(write(tmp_path, *rows)).default_reward == reward


GOOD = {"prompt": "p", "answer": "a", "split": "train"}


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{oops", "not a JSON object"),
        ('["a"]', "a list, not an object"),
        ('{"prompt": "q", "answer": NaN}', "NaN is not JSON"),
        ('{"prompt": "q", "answer": ' + "9" * 5000 + "}", "not a JSON object: Exceeds the limit"),
        (
            '{"prompt": "q", "answer": ' + "[" * 10**5 + "]" * 10**5 + "}",
            "object: maximum recursion",
        ),
        (r'{"prompt": "\ud800", "answer": "a"}', r"'\\ud800' is half of a character"),
        ({"prompt": "q"}, "no field answer"),
        ({"answer": "a"}, "no field prompt"),
        ({**GOOD, "prompt": ""}, "prompt is empty"),
        ({**GOOD, "prompt": []}, "prompt is empty"),
        ({**GOOD, "prompt": 3}, "prompt is 3; it must be text or a list of messages"),
        ({**GOOD, "prompt": [{"role": "user"}]}, 'must be {"role": text, "content": text}'),
        ({**GOOD, "prompt": "q", "anwser": "b"}, r"unknown fields \['anwser'\]"),
        ({**GOOD, "prompt": "q", "split": "dev"}, "split='dev'; choose train or test"),
        ({**GOOD, "prompt": "q", "solution": 4}, "solution is 4; it must be text"),
        ({**GOOD, "prompt": "q", "solution": []}, r"solution is \[\]; .*an odd number of texts"),
        ({**GOOD, "prompt": "q", "solution": ["a", "b"]}, "an odd number of texts"),
        ({**GOOD, "prompt": "q", "solution": ["a", 1, "b"]}, "an odd number of texts"),
        ({**GOOD, "answer": "b"}, "again, with another answer"),
        ({**GOOD, "split": "test"}, "must not be trained on"),
        ({"prompt": "q", "answer": "a"}, "no field split"),
        ({**GOOD, "uid": "u2"}, "again, with another answer or uid"),
    ],
)
def test_a_fault_names_file_and_line(tmp_path: Path, line: Any, what: str) -> None:
    path = write(tmp_path, GOOD, "", line)
    with pytest.raises(TaskError, match=what) as caught:
        load_task(str(path))
    assert str(caught.value).startswith(f"{path}:3: ")


def test_a_solution_may_be_several_turns(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"p{s}", "answer": "x", "split": s, "solution": ["a>", "1", "b"]}
        for s in ("train", "test")
    ]
    assert load(write(tmp_path, *rows)).train[0].solution == ("a>", "1", "b")


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    path = write(tmp_path, *numbered(60))
    expected = load(path).train
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert load(path).train == expected


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "\xe9", "answer": "a"}\n')
    with pytest.raises(TaskError, match=r"latin\.jsonl:1: not a JSON object: 'utf-8' codec"):
        load_task(str(path))


def test_a_line_separator_inside_text_does_not_end_a_line(tmp_path: Path) -> None:
    rows = [{"prompt": f"a\u2028b{s}", "answer": "x", "split": s} for s in ("train", "test")]
    path = tmp_path / "q.jsonl"
    path.write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8"
    )
    assert load(path).train[0].text == "a\u2028btrain"


def test_two_prompts_under_one_uid_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {**GOOD, "uid": "u"}, {**GOOD, "prompt": "q", "uid": "u"})
    with pytest.raises(TaskError, match=f":2: uid='u' names another prompt at {path}:1"):
        load_task(str(path))


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_has_no_prompts(tmp_path: Path, text: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(text)
    with pytest.raises(TaskError, match=r"empty\.jsonl: no prompts in it"):
        load_task(str(path))


@pytest.mark.parametrize(("split", "empty"), [("train", "test"), ("test", "train")])
def test_a_side_without_prompts_is_refused(tmp_path: Path, split: str, empty: str) -> None:
    path = write(tmp_path, *numbered(3, split=split))
    with pytest.raises(
        TaskError, match=f"{empty} split; add lines, or mark some of them .*{empty}"
    ):
        load_task(str(path))


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.jsonl cannot be read: No such file"):
        load_task(str(tmp_path / "absent.jsonl"))


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"task='srot' is unknown; choose sort, .* mean sort\?"):
        load_task("srot")
