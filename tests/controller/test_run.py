"""Whole runs, small: what they leave behind; stopping, resuming and placement change nothing."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from shardloop import hf
from shardloop.config import (
    CheckpointConfig,
    EvalConfig,
    GRPOConfig,
    OptimConfig,
    SamplingConfig,
    SFTConfig,
    TrainConfig,
    WorkersConfig,
)
from shardloop.controller.events import Evaluated, Event, Progress
from shardloop.controller.run import train
from shardloop.controller.rundir import RunFolder, create_run_folder
from shardloop.errors import Interrupted
from shardloop.metrics import read_jsonl
from tests.controller.pages import unexplained
from tests.repo.source import ROOT

STEPS = 4
SMALL = TrainConfig(
    model="tiny",
    task="sort",
    reward="tests.controller.rewards:share_of_digits",
    steps=STEPS,
    sampling=SamplingConfig(max_tokens=7),
    grpo=GRPOConfig(prompts_per_step=4, samples_per_prompt=4, kl_coef=0.001, inner_epochs=2),
    sft=SFTConfig(steps=10, batch_size=16, optim=OptimConfig(lr=2e-3, warmup_steps=2)),
    eval=EvalConfig(prompts=16, every=2),
    checkpoint=CheckpointConfig(every=2, keep=2),
    workers=WorkersConfig(timeout_s=120.0),
)
TIMES = (
    *("seconds", "step_s", "elapsed_s", "tokens_per_s", "rollout_tokens_per_s", "wire_bytes"),
    "checkpoint_seconds",
)


def run(config: TrainConfig, out: Path, **options: object) -> tuple[RunFolder, list[Event]]:
    folder = create_run_folder(dataclasses.replace(config, out=out), label="run")
    return folder, list(train(config, folder, **options))  # type: ignore[arg-type]


def steps_of(folder: RunFolder) -> list[dict[str, object]]:
    """The metrics of each step without what a clock or the wire says."""
    records = read_jsonl(folder.metrics)
    return [{k: v for k, v in record.items() if k not in TIMES} for record in records]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, list[Event]]:
    return run(SMALL, tmp_path_factory.mktemp("whole"))


def test_a_run_tells_every_step_and_leaves_what_it_promises(
    whole_run: tuple[RunFolder, list[Event]],
) -> None:
    folder, events = whole_run
    trained = [e for e in events if isinstance(e, Progress) and e.stage == "train"]
    assert [e.step for e in trained] == [1, 2, 3, 4]
    assert [e.step for e in events if isinstance(e, Evaluated)] == [0, 2, 4]
    manifest = json.loads(folder.manifest.read_text())
    assert manifest["config"]["seed"] == 0 and manifest["plan"]["digest"]
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == ["step-000002", "step-000004"]
    assert "held-out reward, greedy" in folder.report.read_text()
    assert folder.curve.read_bytes().startswith(b"\x89PNG")


def test_the_page_of_metrics_explains_all_that_real_ranks_report(
    whole_run: tuple[RunFolder, list[Event]],
) -> None:
    assert unexplained(whole_run[0]) == set()


def test_engine_and_trainer_agree_and_the_first_kl_is_zero(
    whole_run: tuple[RunFolder, list[Event]],
) -> None:
    steps = read_jsonl(whole_run[0].metrics)
    assert max(step["gap_max"] for step in steps) < 1e-5
    assert steps[0]["kl"] == 0.0
    assert steps[-1]["kl"] > 0.0
    assert [step["version"] for step in steps] == [0, 1, 2, 3]


def test_the_export_is_the_trained_policy(whole_run: tuple[RunFolder, list[Event]]) -> None:
    folder, _ = whole_run
    start = hf.load_model(folder.start, dtype=torch.float32).state_dict()
    end = hf.load_model(folder.export, dtype=torch.float32).state_dict()
    assert start.keys() == end.keys()
    assert not torch.equal(start["model.norm.weight"], end["model.norm.weight"])


def test_a_start_without_its_weights_is_no_start(
    whole_run: tuple[RunFolder, list[Event]], tmp_path: Path
) -> None:
    """An export that was cut off leaves all files but the weights, which come last."""
    assert whole_run[0].has_start()
    folder = RunFolder(tmp_path)
    shutil.copytree(whole_run[0].start, folder.start)
    (folder.start / hf.WEIGHTS_FILE).unlink()
    assert folder.start.exists() and not folder.has_start()


def test_a_stopped_and_resumed_run_equals_one_that_went_through(
    whole_run: tuple[RunFolder, list[Event]], tmp_path: Path
) -> None:
    folder = create_run_folder(dataclasses.replace(SMALL, out=tmp_path), label="stopped")
    seen: list[Event] = []

    def after_two_steps() -> bool:
        return sum(isinstance(e, Progress) and e.stage == "train" for e in seen) >= 2

    with pytest.raises(Interrupted, match=r"stopped after step 2 of 4; go on with"):
        for event in train(SMALL, folder, stop_requested=after_two_steps):
            seen.append(event)
    # A crash after the checkpoint leaves lines of steps that the resumed run makes again.
    with folder.metrics.open("a") as file:
        file.write(json.dumps({"step": 3, "reward": 9.0}) + "\n")
    list(train(folder.read_config(), folder, resume=True))
    assert steps_of(folder) == steps_of(whole_run[0])
    weights = [hf.load_weights(f.export) for f in (folder, whole_run[0])]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_colocated_ranks_train_the_same_policy(
    whole_run: tuple[RunFolder, list[Event]], tmp_path: Path
) -> None:
    colocated = dataclasses.replace(
        SMALL, workers=dataclasses.replace(SMALL.workers, colocate=True)
    )
    folder, _ = run(colocated, tmp_path)
    assert steps_of(folder) == steps_of(whole_run[0])
    wire = [read_jsonl(f.metrics)[0]["wire_bytes"] for f in (folder, whole_run[0])]
    assert 0 <= wire[0] < wire[1]


def test_the_library_program_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = re.findall(r"```py\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "step 0: greedy reward " in printed and "step 4: greedy reward " in printed
    assert (tmp_path / "runs" / "from-python" / "export" / hf.WEIGHTS_FILE).is_file()
