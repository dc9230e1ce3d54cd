"""A whole run with everything turned on at once, cut and placed in two ways: the same training."""

import dataclasses
import math
from pathlib import Path

import pytest

from shardloop.config import (
    EngineConfig,
    EvalConfig,
    GRPOConfig,
    SamplingConfig,
    TrainConfig,
    TrainerConfig,
    WorkersConfig,
)
from shardloop.metrics import read_jsonl
from tests.controller.test_run import TIMES, run

EVERYTHING = TrainConfig(
    model="tiny",
    task="sort",
    reward="tests.controller.rewards:share_of_digits",
    steps=3,
    sampling=SamplingConfig(max_tokens=7, top_p=0.98, min_p=0.001, stop=("00", "1 2")),
    grpo=GRPOConfig(
        prompts_per_step=4,
        samples_per_prompt=4,
        inner_epochs=2,
        advantage="rloo",
        loss="gspo",
        aggregation="sequence-mean",
        kl_coef=0.1,
        kl_in="reward",
        entropy_coef=0.001,
        correction="sequence",
        correction_mode="mask",
        correction_floor=0.5,
        overlong="penalty",
        overlong_buffer=2,
        resample_rounds=2,
    ),
    trainer=TrainerConfig(layout="fsdp=2", dtype="float64"),
    engine=EngineConfig(layout="engine:tp=1", dtype="float64"),
    eval=EvalConfig(prompts=8),
    workers=WorkersConfig(timeout_s=240.0),
)


@pytest.mark.slow
def test_every_option_at_once_trains_alike_however_it_is_cut_and_placed(tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(
        EVERYTHING,
        trainer=dataclasses.replace(
            EVERYTHING.trainer,
            layout="fsdp=2,tp=2",
            sequence_parallel=True,
            activation_checkpointing=True,
        ),
        engine=EngineConfig(layout="engine:replicas=2,tp=2", dtype="float64", sleep="weights"),
        workers=dataclasses.replace(EVERYTHING.workers, colocate=True),
    )
    folders = [run(config, tmp_path)[0] for config in (EVERYTHING, elsewhere)]
    one, other = (read_jsonl(folder.metrics) for folder in folders)
    assert [step["step"] for step in one] == [1, 2, 3]
    for ours, theirs in zip(one, other, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - set(TIMES):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-6, abs=1e-9), name
        assert ours["gap_max"] < 1e-9 and ours["cut_fraction"] == 0.0
        assert ours["update"] == 1 and ours["groups_kept"] == 4
        assert math.isfinite(ours["loss"])
    assert one[0]["kl"] == 0.0 < one[-1]["kl"]
    rewards = [read_jsonl(folder.evals)[-1] for folder in folders]
    assert rewards[0]["sampled"] == pytest.approx(rewards[1]["sampled"])


@pytest.mark.slow
def test_with_zero_gap_engine_and_trainer_give_the_same_bits(tmp_path: Path) -> None:
    config = dataclasses.replace(
        EVERYTHING,
        zero_gap=True,
        grpo=GRPOConfig(prompts_per_step=4, samples_per_prompt=4),
        trainer=TrainerConfig(layout="fsdp=2"),
        engine=EngineConfig(layout="engine:replicas=2,tp=1"),
    )
    folder, _ = run(config, tmp_path)
    steps = read_jsonl(folder.metrics)
    assert [(step["gap_max"], step["ess"]) for step in steps] == [(0.0, 1.0)] * 3
