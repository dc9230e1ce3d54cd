"""What can be refused before a process starts is refused then, by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardloop.config import (
    EngineConfig,
    EvalConfig,
    GRPOConfig,
    SamplingConfig,
    SFTConfig,
    TrainConfig,
    TrainerConfig,
)
from shardloop.controller.setup import MOST_PROCESSES, Setup, first_train_prompts, resolve
from shardloop.errors import LayoutError, ModelError, TaskError, UsageError
from shardloop.tasks import load_task
from shardloop.tiny import build_tiny

SMALL = TrainConfig(
    steps=2,
    sampling=SamplingConfig(max_tokens=7),
    grpo=GRPOConfig(prompts_per_step=4, samples_per_prompt=2),
    trainer=TrainerConfig(layout="fsdp=1"),
    engine=EngineConfig(layout="engine:tp=1"),
    eval=EvalConfig(prompts=4),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"), seed=0)


def rows(count: int = 40, **fields: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}+1=", "answer": str(i + 1), **fields} for i in range(count)]


def resolve_rows(tiny: Path, folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Setup:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return resolve(replace(SMALL, task=str(path), **changes), tiny)


@pytest.mark.parametrize("place", [0, 17, 39])
@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"answer": 7}, r"reward exact: prompt 'odd' \('q='\) has answer=7; it must be text"),
        ({"prompt": "é="}, r"prompt 'odd' \('é='\): .* lacks 'é' \(U\+00E9\)"),
        ({"prompt": "1" * 200}, "prompt 'odd' has 201 tokens; .*max_tokens=7.*context of 128"),
    ],
)
def test_one_unusable_prompt_of_many_is_named_before_the_start(
    tiny: Path, tmp_path: Path, place: int, change: dict[str, Any], what: str
) -> None:
    questions = rows()
    questions[place] = {"prompt": "q=", "answer": "1", "uid": "odd"} | change
    with pytest.raises(TaskError, match=what):
        resolve_rows(tiny, tmp_path, questions)


@pytest.mark.parametrize(
    ("solution", "what"),
    [
        (None, "has no worked solution"),
        ("é", r"solution of prompt 'odd' \('q='\): .* lacks 'é'"),
        ("1" * 130, "'odd' .*has 3 tokens; with its solution of 131 it exceeds .* context of 128"),
    ],
)
def test_a_solution_that_cannot_be_imitated_is_named_if_sft_is_wanted(
    tiny: Path, tmp_path: Path, solution: str | None, what: str
) -> None:
    questions = rows(solution="1")
    sides = {"split": "train", "uid": "odd"}
    questions = [{**row, "split": "train" if i else "test"} for i, row in enumerate(questions)]
    questions.append({"prompt": "q=", "answer": "1", "solution": solution, **sides})
    resolve_rows(tiny, tmp_path, questions)
    with pytest.raises(TaskError, match=what):
        resolve_rows(tiny, tmp_path, questions, sft=SFTConfig(steps=1))


def test_an_answer_longer_than_the_context_blames_max_tokens(tiny: Path) -> None:
    with pytest.raises(UsageError, match=r"max_tokens=128 leaves no room .* context of 128"):
        resolve(replace(SMALL, sampling=SamplingConfig(max_tokens=128)), tiny)


def test_an_answer_that_nothing_would_end_is_refused(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path, seed=0)
    for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**fields, key: None}))
    with pytest.raises(ModelError, match="task sort: nothing would end an answer"):
        resolve(SMALL, folder)
    newline = resolve(replace(SMALL, task="addition"), folder)
    assert len(newline.sampling.stop_token_ids) == 1


@pytest.mark.parametrize("trainer", ["fsdp=1000", "dp=100000,fsdp=1000"])
def test_more_processes_than_a_machine_bears_are_refused(tiny: Path, trainer: str) -> None:
    config = replace(SMALL, trainer=TrainerConfig(layout=trainer))
    with pytest.raises(LayoutError, match=rf"need 1\d+ processes .* at most {MOST_PROCESSES} tog"):
        resolve(config, tiny)


def test_a_run_that_asks_much_has_its_first_prompts_looked_at() -> None:
    sort, addition = load_task("sort"), load_task("addition")
    assert len(first_train_prompts(sort, SMALL)) == SMALL.steps * 4
    assert len(first_train_prompts(sort, replace(SMALL, steps=10**9))) == 10_000
    distinct = {prompt.uid for prompt in first_train_prompts(addition, SMALL)}
    assert len(distinct) == len(addition.train)  # type: ignore[attr-defined]
