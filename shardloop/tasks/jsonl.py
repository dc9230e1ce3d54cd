"""Questions from a JSON Lines file of yours. Floor 1; made by `tasks.load_task`.

One object a line:

    prompt     text, or a list of {"role", "content"} messages that go through the chat template
    answer     any JSON value: whatever the reward needs
    solution   optional text to imitate in supervised fine-tuning; or a list of texts, the policy's
               and its environment's in turn
    split      optional "train" or "test", on every line or on none; without it 1 prompt in 10 is
               held out
    uid        optional name of the question; by default a hash of the prompt
"""

import codecs
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from shardloop.errors import TaskError, UsageError
from shardloop.tasks.base import FiniteTask, split_of, stable_hash
from shardloop.types import Prompt, Split

FIELDS = ("prompt", "answer", "solution", "split", "uid")


@dataclass(frozen=True, slots=True)
class _Row:
    where: str
    key: str
    """The prompt as canonical JSON text: equal exactly when the question is."""
    split: Split | None
    prompt: Prompt


def jsonl_task(path: Path) -> FiniteTask[Prompt]:
    """Reads and checks the whole file.

    Raises:
        UsageError: the file cannot be read.
        TaskError: a line cannot be used, a question stands on both sides of the split or has two
            answers, or a side of the split is empty. The message names the file and the line.
    """
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"task file {path} cannot be read: {reason}; give the path of a JSONL file"
        ) from error
    rows = [
        _read_row(line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not rows:
        raise TaskError(f"{path}: no prompts in it; write one JSON object a line")
    _check_same_questions(rows)
    train, test = _divide(rows, path)
    reward = _reward_for(rows)
    return FiniteTask(
        name=str(path), default_reward=reward, train=train, test=test, to_prompt=lambda row: row
    )


def _read_row(line: bytes, where: str) -> _Row:
    def fail(what: str) -> NoReturn:
        raise TaskError(f"{where}: {what}")

    try:
        record = json.loads(
            line.decode("utf-8"), parse_constant=lambda name: fail(f"{name} is not JSON")
        )
        json.dumps(record, ensure_ascii=False).encode("utf-8")
    except TaskError:
        raise
    except UnicodeEncodeError as error:
        lone = error.object[error.start]
        raise TaskError(f"{where}: {lone!r} is half of a character; write the whole") from error
    except (ValueError, RecursionError) as error:  # bytes, syntax, huge numbers, deep nesting
        raise TaskError(f"{where}: not a JSON object: {error}") from error
    if not isinstance(record, dict):
        fail(f"a {type(record).__name__}, not an object with {', '.join(FIELDS)}")
    if unknown := sorted(record.keys() - set(FIELDS)):
        fail(f"unknown fields {unknown}; allowed are {', '.join(FIELDS)}")
    if missing := [name for name in ("prompt", "answer") if name not in record]:
        fail(f"no field {' and no field '.join(missing)}")
    if (split := record.get("split")) not in (None, "train", "test"):
        fail(f"split={split!r}; choose train or test")
    if not isinstance(record.get("uid"), str | None):
        fail(f"uid is {record['uid']!r}; it must be text")
    _check_solution(record.get("solution"), fail)
    return _row(record, where, fail)


def _row(record: dict[str, Any], where: str, fail: Callable[[str], NoReturn]) -> _Row:
    prompt, solution = record["prompt"], record.get("solution")
    _check_prompt(prompt, fail)
    key = json.dumps(prompt, sort_keys=True)
    return _Row(
        where=where,
        key=key,
        split=cast(Split | None, record.get("split")),
        prompt=Prompt(
            uid=record.get("uid") or f"{stable_hash(key):016x}",
            text=prompt if isinstance(prompt, str) else None,
            messages=None if isinstance(prompt, str) else tuple(prompt),
            answer=record["answer"],
            solution=tuple(solution) if isinstance(solution, list) else solution,
        ),
    )


def _check_prompt(prompt: Any, fail: Callable[[str], NoReturn]) -> None:
    if not isinstance(prompt, str | list):
        fail(f"prompt is {prompt!r}; it must be text or a list of messages")
    if not prompt:
        fail("prompt is empty")
    if isinstance(prompt, str):
        return
    for message in prompt:
        well_formed = isinstance(message, dict) and message.keys() == {"role", "content"}
        if not well_formed or not all(isinstance(value, str) for value in message.values()):
            fail(f'message {message!r}; each must be {{"role": text, "content": text}}')


def _check_solution(solution: Any, fail: Callable[[str], NoReturn]) -> None:
    texts = solution if isinstance(solution, list) else [solution or ""]
    if not all(isinstance(text, str) for text in texts) or len(texts) % 2 == 0:
        fail(
            f"solution is {solution!r}; it must be text, or an odd number of texts: the policy's"
            " and its environment's in turn"
        )


def _check_same_questions(rows: list[_Row]) -> None:
    """A question may be repeated, but has one identity, one answer and one side; so has a uid."""
    by_key: dict[str, _Row] = {}
    by_uid: dict[str, _Row] = {}
    for row in rows:
        first = by_key.setdefault(row.key, row)
        if first.split != row.split:
            raise TaskError(
                f"{row.where}: the prompt of {first.where} again, with split={row.split!r} after"
                f" split={first.split!r}; a held-out question must not be trained on"
            )
        if (first.prompt.answer, first.prompt.uid) != (row.prompt.answer, row.prompt.uid):
            raise TaskError(
                f"{row.where}: the prompt of {first.where} again, with another answer or uid"
            )
        namesake = by_uid.setdefault(row.prompt.uid, row)
        if namesake.key != row.key:
            raise TaskError(
                f"{row.where}: uid={row.prompt.uid!r} names another prompt at {namesake.where}"
            )


def _divide(rows: list[_Row], path: Path) -> tuple[list[Prompt], list[Prompt]]:
    unmarked = [row for row in rows if row.split is None]
    if unmarked and len(unmarked) < len(rows):
        raise TaskError(
            f"{unmarked[0].where}: no field split, but other lines have one: mark all or none"
        )
    sides: dict[str, list[Prompt]] = {"train": [], "test": []}
    for row in rows:
        sides[row.split or split_of(row.key)].append(row.prompt)
    for side, prompts in sides.items():
        if not prompts:
            advice = (
                'put "split": "train" or "test" on every line'
                if unmarked
                else f'mark some of them "split": "{side}"'
            )
            raise TaskError(
                f"{path}: none of its {len(rows)} prompts is in the {side} split; add lines, or "
                f"{advice}"
            )
    return sides["train"], sides["test"]


def _reward_for(rows: list[_Row]) -> str:
    """Numbers are compared as numbers, everything else as text (`exact` refuses what is none)."""
    answers = [row.prompt.answer for row in rows]
    numbers = all(isinstance(a, int | float) and not isinstance(a, bool) for a in answers)
    return "number" if numbers else "exact"
