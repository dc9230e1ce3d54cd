"""The tiny presets learn: the claim of the README, on fewer steps."""

import dataclasses
import statistics
from pathlib import Path

import pytest

from shardloop.config import EvalConfig
from shardloop.controller.run import train
from shardloop.controller.rundir import create_run_folder
from shardloop.metrics import read_jsonl
from shardloop.presets import PRESETS


@pytest.mark.slow
def test_the_reward_of_the_tiny_preset_rises_and_trainer_and_engine_agree(tmp_path: Path) -> None:
    config = dataclasses.replace(
        PRESETS["tiny"], steps=60, out=tmp_path, eval=EvalConfig(prompts=64, every=0)
    )
    folder = create_run_folder(config, label="tiny")
    list(train(config, folder))
    steps = read_jsonl(folder.metrics)
    rewards = [step["reward"] for step in steps]
    assert statistics.fmean(rewards[40:]) > statistics.fmean(rewards[:10]) + 0.08
    assert max(step["gap_max"] for step in steps) < 1e-4
    assert steps[0]["kl"] == 0.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_calculator_preset_learns_to_call_and_rows_of_several_turns_agree(
    tmp_path: Path,
) -> None:
    preset = PRESETS["calculator"]
    config = dataclasses.replace(
        preset,
        steps=16,
        out=tmp_path,
        sft=dataclasses.replace(preset.sft, steps=220),
        eval=EvalConfig(prompts=64, every=0),
    )
    folder = create_run_folder(config, label="calculator")
    list(train(config, folder))
    steps = read_jsonl(folder.metrics)
    rewards = [step["reward"] for step in steps]
    assert statistics.fmean(rewards[12:]) > statistics.fmean(rewards[:4]) + 0.25
    before, after = read_jsonl(folder.evals)
    assert after["sampled"] > before["sampled"] + 0.25
    assert max(step["gap_max"] for step in steps) < 1e-4
