"""A run that was killed anywhere and resumed leaves what an uninterrupted one does.

Whole runs in this process: the ranks are a policy of one row of logits (see `fakes`).
"""

import itertools
import json
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardloop.checkpoint import TRAINER_FILE, SaveReport, latest_checkpoint, prune_checkpoints
from shardloop.config import (
    CheckpointConfig,
    EvalConfig,
    GRPOConfig,
    OptimConfig,
    SFTConfig,
    TrainConfig,
)
from shardloop.controller import report, stages
from shardloop.controller import run as run_module
from shardloop.controller.events import Event, Note
from shardloop.controller.manifest import read_manifest
from shardloop.controller.rollouts import Sampler
from shardloop.controller.run import Setup, check, train
from shardloop.controller.rundir import RunFolder
from shardloop.controller.stages import Roles
from shardloop.errors import CheckpointError, Interrupted, UsageError
from shardloop.metrics import read_jsonl
from shardloop.types import Completion, Prompt, Request, Sampling
from tests.controller.fakes import (
    STOP,
    InProcessGroup,
    LetterTokenizer,
    RowEngine,
    RowSync,
    RowTrainer,
    engines_of,
)
from tests.controller.pages import unexplained

CONFIG = TrainConfig(
    reward="tests.controller.test_resume:share_of_a",
    steps=5,
    grpo=GRPOConfig(prompts_per_step=2, samples_per_prompt=4),
    optim=OptimConfig(lr=0.5, warmup_steps=1, schedule="cosine"),
    eval=EvalConfig(prompts=4, every=2),
    checkpoint=CheckpointConfig(every=2, keep=5),
)
CLOCKS = (
    *("seconds", "step_s", "tokens_per_s", "rollout_tokens_per_s", "elapsed_s", "wire_bytes"),
    "checkpoint_seconds",
)
"""What a clock or the wire says: a resumed run may sync once more."""


def share_of_a(prompt: Prompt, text: str, *, finished: bool) -> float:
    return text.count("a") / 3


def always_half(prompt: Prompt, text: str, *, finished: bool) -> float:
    return 0.5


class SavedTrainer(RowTrainer):
    """With an export, and checkpoints that are complete a while after they are asked for."""

    def save(self, path: Path, *, extra: dict[str, Any], keep: int, background: bool) -> None:
        state = {"logits": self.logits_V.tolist(), "version": self.version, "extra": extra}
        self.pending = path, json.dumps(state), keep
        self.num_asked = 0

    def is_saving(self) -> bool:
        self.num_asked += 1
        return self.num_asked < 2

    def finish_save(self) -> SaveReport:
        path, text, keep = self.pending
        path.mkdir(parents=True)
        (path / TRAINER_FILE).write_text(text)
        prune_checkpoints(path.parent, keep=keep)
        return SaveReport(path=path, stall_s=0.5, wait_s=0.25, write_s=1.0)

    def load(self, path: Path) -> dict[str, Any]:
        state = json.loads((path / TRAINER_FILE).read_text())
        with torch.no_grad():
            self.logits_V.copy_(torch.tensor(state["logits"], dtype=torch.float64))
        self.version = state["version"]
        return state["extra"]


class EmptyEngine(RowEngine):
    """Refuses to generate before the first sync, as the real one does."""

    def generate(self, requests: list[Request]) -> list[Completion]:
        assert self.version >= 0, "generate on an engine without weights"
        return super().generate(requests)


class AnyText(LetterTokenizer):
    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return [1, 2]


def fake_spawn(workers: object, setup: Setup) -> Roles:
    trainer, engine = SavedTrainer(), EmptyEngine()
    sampler = Sampler(
        engine=engines_of(engine),
        tokenizer=AnyText(),
        sampling=Sampling(max_tokens=3, stop_token_ids=(STOP,)),
        context_length=16,
    )
    return Roles(
        trainer=InProcessGroup(trainer),  # type: ignore[arg-type]
        sampler=sampler,
        sync=InProcessGroup(RowSync(trainer, engine)),  # type: ignore[arg-type]
    )


def fake_export(
    trainer: InProcessGroup, sampler: Sampler, folder: Path, *, prompts: list[Prompt], seed: int
) -> float:
    sampler.rollout(prompts[:1], samples_per_prompt=1, seed=seed)
    folder.mkdir(exist_ok=True)
    (folder / "logits").write_text(str(trainer.objects[0].logits_V.tolist()))
    return 0.0


def no_ranks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_module, "start_workers", lambda setup: nullcontext())
    patch.setattr(run_module, "spawn", fake_spawn)
    patch.setattr(stages, "export_policy", fake_export)
    patch.setattr(report, "draw_curve", lambda metrics, path, **_: path.touch())


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    no_ranks(monkeypatch)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("whole") / "run")
    with pytest.MonkeyPatch.context() as patch:
        no_ranks(patch)
        list(train(CONFIG, folder))
    return folder


def resumed(folder: RunFolder, **changes: Any) -> list[Event]:
    return list(train(replace(folder.read_config(), **changes), folder, resume=True))


def outcome(folder: RunFolder) -> tuple[object, ...]:
    """All that a run leaves but what a clock says."""
    records = [
        [{k: v for k, v in record.items() if k not in CLOCKS} for record in read_jsonl(path)]
        for path in (folder.metrics, folder.evals)
    ]
    newest = latest_checkpoint(folder.checkpoints)
    assert newest is not None and folder.report.is_file()
    return *records, newest.name, (folder.export / "logits").read_text()


def stop_at(folder: RunFolder, step: int) -> None:
    with pytest.raises(Interrupted, match=f"stopped after step {step} of 5; go on with"):
        list(
            train(
                CONFIG,
                folder,
                stop_requested=lambda: len(read_jsonl(folder.metrics)) >= step,
            )
        )
    newest = latest_checkpoint(folder.checkpoints)
    assert newest is not None and newest.name == f"step-00000{step}", "a run ends with a checkpoint"


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_run_stopped_after_any_step_and_resumed_equals_one_that_went_through(
    uninterrupted: RunFolder, tmp_path: Path, step: int
) -> None:
    """Whether or not a checkpoint or an evaluation was due there."""
    folder = RunFolder(tmp_path / "run")
    stop_at(folder, step)
    resumed(folder)
    assert outcome(folder) == outcome(uninterrupted)


def test_a_run_killed_at_any_event_and_resumed_equals_one_that_went_through(
    uninterrupted: RunFolder, tmp_path: Path
) -> None:
    num_events = len(list(train(CONFIG, RunFolder(tmp_path / "counted"))))
    for number in range(2, num_events):
        folder = RunFolder(tmp_path / f"killed-{number}")
        with closing(train(CONFIG, folder)) as events:
            seen = list(itertools.islice(events, number))
        if not folder.root.exists():  # there was nothing to go on from
            continue
        resumed(folder)
        assert outcome(folder) == outcome(uninterrupted), f"killed after {seen[-1]}"


def test_a_run_killed_between_its_last_checkpoint_and_its_export_is_finished(
    uninterrupted: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_export(*_: object, **__: object) -> float:
        raise CheckpointError("disk full")

    folder = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(stages, "export_policy", no_export)
        with pytest.raises(CheckpointError):
            list(train(CONFIG, folder))
    # As an older order of things could leave it: the checkpoint, but not its evaluation.
    kept = folder.evals.read_text().splitlines(keepends=True)[:-1]
    folder.evals.write_text("".join(kept))
    resumed(folder)
    assert outcome(folder) == outcome(uninterrupted)


def test_an_evaluation_is_never_filed_under_another_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    stop_at(folder, 2)
    folder.evals.unlink()
    resumed(folder)
    assert [record["step"] for record in read_jsonl(folder.evals)] == [2, 4, 5]


def test_a_finished_run_can_be_resumed_and_extended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    list(train(CONFIG, folder))
    resumed(folder)
    resumed(folder, steps=7)
    assert [record["step"] for record in read_jsonl(folder.evals)] == [0, 2, 4, 5, 6, 7]
    assert folder.read_config().steps == 7, "a later resume goes on to the same number"


def test_fewer_steps_than_done_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    list(train(CONFIG, folder))
    before = {path: path.read_bytes() for path in folder.root.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="already at step 5; choose --steps 5 or more"):
        resumed(folder, steps=4)
    with pytest.raises(UsageError, match="already at step 5"):
        check(replace(CONFIG, steps=4), folder.root, resume=True)
    assert {p: p.read_bytes() for p in folder.root.rglob("*") if p.is_file()} == before


def test_a_resume_that_fails_leaves_the_manifest_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    stop_at(folder, 2)
    before = folder.manifest.read_bytes()

    def load(self: SavedTrainer, path: Path) -> dict[str, Any]:
        raise CheckpointError(f"{path} is damaged")

    with monkeypatch.context() as patch:
        patch.setattr(SavedTrainer, "load", load)
        with pytest.raises(CheckpointError, match="damaged"):
            resumed(folder, steps=9)
    assert folder.manifest.read_bytes() == before
    resumed(folder, steps=6)
    first, now = json.loads(before), read_manifest(folder.manifest)
    (entry,) = now.pop("resumed")
    assert first.pop("resumed") == [] and now == first
    assert (entry["changes"], entry["from_step"]) == ({"steps": 6}, 2)
    assert set(entry) == {"created", "command", "commit", "changes", "from_step"}


def test_a_line_that_a_crash_cut_off_is_made_again(
    uninterrupted: RunFolder, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    stop_at(folder, 2)
    for path in (folder.metrics, folder.evals):
        with path.open("a") as file:
            file.write('{"step": 3, "rew')
    resumed(folder)
    assert outcome(folder) == outcome(uninterrupted)


def test_a_run_that_fails_before_it_has_anything_leaves_no_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(UsageError, match="tp=3 does not divide"):
        list(train(replace(CONFIG, engine=replace(CONFIG.engine, layout="engine:tp=3")), folder))
    assert not folder.root.exists()
    for what, is_kept in (("starting", False), ("Progress", True)):
        with closing(train(CONFIG, folder)) as events:
            next(event for event in events if what in str(event))
        assert folder.root.exists() == is_kept


def test_a_new_run_needs_a_folder_without_another(uninterrupted: RunFolder) -> None:
    before = outcome(uninterrupted)
    with pytest.raises(UsageError, match="is not empty"):
        list(train(CONFIG, uninterrupted))
    assert outcome(uninterrupted) == before


def test_two_processes_never_work_in_one_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    stop_at(folder, 2)
    with (
        folder.locked(),
        pytest.raises(UsageError, match=f"another process is running in {folder.root}"),
    ):
        resumed(folder)
    resumed(folder)


def test_wall_time_goes_on_where_the_kept_part_of_a_run_ended(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    stop_at(folder, 2)
    lines = [{**record, "elapsed_s": 1000.0} for record in read_jsonl(folder.metrics)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    resumed(folder)
    elapsed = [record["elapsed_s"] for record in read_jsonl(folder.metrics)]
    assert elapsed[:2] == [1000.0, 1000.0] and 1000.0 < elapsed[2] < elapsed[4] < 1100.0
    assert "| 16 min 4" in folder.report.read_text()


def test_a_run_that_never_had_signal_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    flat = replace(CONFIG, reward="tests.controller.test_resume:always_half", steps=12)
    notes = [event.text for event in train(flat, folder) if isinstance(event, Note)]
    assert sum("no update in 10 steps" in note for note in notes) == 1
    assert "0 of 12" in folder.report.read_text()


def test_a_run_that_only_its_kl_term_moves_says_so(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    pulled = replace(CONFIG.grpo, kl_coef=0.1)
    flat = replace(CONFIG, grpo=pulled, reward="tests.controller.test_resume:always_half", steps=11)
    notes = [event.text for event in train(flat, folder) if isinstance(event, Note)]
    assert sum("only the KL or entropy term moves the weights in 10" in note for note in notes) == 1


def test_the_page_of_metrics_explains_all_that_a_run_writes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    grpo = replace(CONFIG.grpo, kl_coef=0.1, resample_rounds=1)
    list(train(replace(CONFIG, grpo=grpo), folder))
    assert unexplained(folder) == set()


def test_gpus_that_are_not_there_are_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    config = replace(CONFIG, workers=replace(CONFIG.workers, device="cuda"))
    for attempt in (
        lambda: check(config, tmp_path / "run"),
        lambda: list(train(config, RunFolder(tmp_path / "run"))),
    ):
        with pytest.raises(UsageError, match="with 4 ranks, but torch sees 3 GPUs"):
            attempt()
    assert not (tmp_path / "run").exists()
    assert "cuda" not in check(replace(CONFIG, sft=SFTConfig(steps=3)), tmp_path / "run")
