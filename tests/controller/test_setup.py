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
from shardloop.controller.describe import describe
from shardloop.controller.setup import MOST_PROCESSES, Setup, first_train_prompts, resolve
from shardloop.errors import LayoutError, ModelError, RewardError, TaskError, UsageError
from shardloop.tasks import load_task
from shardloop.tiny import build_tiny
from shardloop.types import Prompt

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


@pytest.mark.parametrize("trainer", ["fsdp=1000", "dp=100,fsdp=100"])
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


@pytest.mark.parametrize(
    "layout", ["engine:tp=2", "engine:replicas=3", "engine:replicas=2,tp=2", "engine:replicas=1"]
)
def test_an_engine_may_have_replicas_each_of_them_a_role(tiny: Path, layout: str) -> None:
    setup = resolve(replace(SMALL, engine=EngineConfig(layout=layout)), tiny)
    placement, roles = setup.placement, setup.placement.roles()
    replicas = [ranks for role, ranks in roles.items() if role.startswith("engine/")]
    assert len(replicas) == (0 if placement.num_replicas == 1 else placement.num_replicas)
    assert sum(replicas, ()) in ((), placement.engine_ranks) and roles["engine"]
    assert f"engine      {layout} on ranks" in describe(setup, root=tiny)


@pytest.mark.parametrize("layout", ["fsdp=2", "engine:tp=2,replicas=2"])
def test_a_layout_that_is_no_engine_of_ours_is_refused(tiny: Path, layout: str) -> None:
    with pytest.raises(LayoutError, match=r"choose engine:tp=N .* engine:replicas=R,tp=N"):
        resolve(replace(SMALL, engine=EngineConfig(layout=layout)), tiny)


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (TrainerConfig(layout="fsdp=1", sequence_parallel=True), "add tp=2 or more to the layout"),
        (TrainerConfig(layout="tp=4"), "tp=4 does not divide num_kv_heads=2; choose tp from 1, 2"),
    ],
)
def test_trainer_settings_that_do_not_go_together_are_refused(
    tiny: Path, trainer: TrainerConfig, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(replace(SMALL, trainer=trainer), tiny)


@pytest.mark.parametrize(
    ("trainer", "engine", "message"),
    [
        ({}, {"layout": "engine:tp=2"}, "engine:tp=2 has tp=2, choose engine:replicas=R,tp=1"),
        ({"layout": "tp=2"}, {}, "layout tp=2 has tp=2, choose fsdp=N"),
        (
            {"dtype": "float64"},
            {},
            "trainer.dtype=float64 and engine.dtype=float32, choose float32",
        ),
        ({"compute_dtype": "bfloat16"}, {}, "trainer.compute-dtype=bfloat16, leave it out"),
    ],
)
def test_zero_gap_names_what_keeps_both_sides_from_computing_alike(
    tiny: Path, trainer: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    config = replace(
        SMALL,
        zero_gap=True,
        trainer=replace(SMALL.trainer, **trainer),
        engine=replace(SMALL.engine, **engine),
    )
    with pytest.raises(UsageError, match=f"zero-gap needs .*{message}"):
        resolve(config, tiny)
    assert "zero gap to the engine" in describe(
        resolve(replace(SMALL, zero_gap=True), tiny), root=tiny
    )


def test_stop_texts_and_cuts_of_the_settings_reach_the_engine(tiny: Path) -> None:
    drawn = SamplingConfig(max_tokens=7, min_p=0.1, stop=("12", "3"))
    setup = resolve(replace(SMALL, sampling=drawn), tiny)
    assert (setup.sampling.min_p, setup.sampling.stop) == (0.1, ("12", "3"))
    assert "min-p 0.1, up to '12' or '3'" in describe(setup, root=tiny)


def broken_reward(prompt: Prompt, text: str, *, finished: bool) -> float:
    raise KeyError("answer")


def test_a_broken_reward_of_the_user_is_found_before_the_start(tiny: Path) -> None:
    name = f"{__name__}:broken_reward"
    with pytest.raises(RewardError, match=r"tried on an empty completion .*KeyError") as caught:
        resolve(replace(SMALL, reward=name), tiny)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("name", "message"),
    [("dividing", "in turn 1 raised ZeroDivisionError"), ("sharing", "that another sample has")],
)
def test_a_broken_environment_is_found_before_the_start(
    tiny: Path, name: str, message: str
) -> None:
    with pytest.raises(TaskError, match=rf"tried on an empty turn .*{message}"):
        resolve(replace(SMALL, task=f"tests.tasks.user_tasks:{name}"), tiny)


def test_what_is_told_of_a_run_names_its_environment_and_what_ends_a_turn(tiny: Path) -> None:
    drawn = SamplingConfig(max_tokens=9, stop=("12", ">"))
    grpo = replace(SMALL.grpo, aggregation="sequence-sum")
    config = replace(SMALL, task="calculator", sampling=drawn, grpo=grpo)
    told = describe(resolve(config, tiny), root=tiny)
    assert "calculator, in turns with an environment, judged by final" in told
    assert "at most 9 tokens over all turns, temperature 1, up to '>' or '12'" in told
    assert "sequence-sum over 9;" in told
    assert "environment" not in describe(resolve(SMALL, tiny), root=tiny)
