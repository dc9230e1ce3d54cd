"""`shardloop train` around its runs: seeds, names, Ctrl-C, what is refused before anything runs."""

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardloop.cli import train as command
from shardloop.cli.main import main
from shardloop.cli.view import Pace, clock, header, row
from shardloop.config import TrainConfig
from shardloop.controller.events import Event, Note
from shardloop.controller.manifest import write_manifest
from shardloop.controller.rundir import RunFolder
from shardloop.errors import Interrupted
from shardloop.presets import PRESETS


class FakeRuns:
    """Stands for `controller.run.train`: a run is a manifest, two evaluations and a report."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.during: Callable[[TrainConfig], None] = lambda config: None
        self.after: Callable[[TrainConfig], None] = lambda config: None

    def train(
        self, config: TrainConfig, folder: RunFolder, *, resume: bool, stop_requested: Any
    ) -> Iterator[Event]:
        self.begun.append((folder.root.name, config.seed))
        write_manifest(folder.manifest, config, {})
        yield Note("begun")
        folder.metrics.write_text('{"step": 1}\n')
        self.during(config)
        evals = [{"step": s, "prompts": 4, "greedy": 0.5, "sampled": 0.25} for s in (0, 1)]
        folder.evals.write_text("".join(json.dumps(record) + "\n" for record in evals))
        folder.report.write_text(f"report of seed {config.seed}\n")
        self.after(config)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> FakeRuns:
    fake = FakeRuns()
    monkeypatch.setattr(command, "train", fake.train)
    return fake


def on_seed(seed: int, *signals: int) -> Callable[[TrainConfig], None]:
    def send(config: TrainConfig) -> None:
        if config.seed == seed:
            for number in signals:
                signal.raise_signal(number)

    return send


def test_seeds_run_one_after_the_other_and_leave_a_table(
    runs: FakeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--seeds", "3", "--seed", "4", "--out", str(tmp_path)]) == 0
    assert runs.begun == [("tiny-seed4", 4), ("tiny-seed5", 5), ("tiny-seed6", 6)]
    table = (tmp_path / "seeds-report.md").read_text()
    printed = capsys.readouterr().out
    assert table in printed and f"seeds report: {tmp_path}" in printed
    assert "mean of 3 [95 %, t]" in table


def test_a_name_gets_the_seed_and_every_folder_is_checked_before_the_first_run(
    runs: FakeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--name", "x", "--seeds", "2", "--out", str(tmp_path)]
    (tmp_path / "x-seed1").mkdir()
    assert main(arguments) == 2
    assert "x-seed1 exists" in capsys.readouterr().err and runs.begun == []
    (tmp_path / "x-seed1").rmdir()
    assert main(arguments) == 0
    assert runs.begun == [("x-seed0", 0), ("x-seed1", 1)]
    assert main(["train", "--name", "x", "--out", str(tmp_path)]) == 0
    assert runs.begun[-1] == ("x", 0)


def test_ctrl_c_in_the_last_phase_of_a_seed_keeps_the_others_from_beginning(
    runs: FakeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.during = on_seed(0, signal.SIGINT)
    assert main(["train", "--seeds", "3", "--out", str(tmp_path)]) == 130
    assert [seed for _, seed in runs.begun] == [0]
    errors = capsys.readouterr().err
    assert "stopped after the run of seed 0 (not begun: seed 1, 2)" in errors


def test_a_stop_within_a_seed_says_how_to_go_on_and_which_seeds_are_left(
    runs: FakeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(config: TrainConfig) -> None:
        if config.seed == 1:
            raise Interrupted("stopped after step 7; go on with X")

    runs.during = stop
    assert main(["train", "--seeds", "3", "--out", str(tmp_path)]) == 130
    assert "go on with X (not begun: seed 2)" in capsys.readouterr().err


def test_ctrl_c_after_the_last_step_of_a_single_run_changes_nothing(
    runs: FakeRuns, tmp_path: Path
) -> None:
    runs.during = on_seed(0, signal.SIGTERM)
    assert main(["train", "--out", str(tmp_path)]) == 0


def test_a_second_ctrl_c_ends_at_once_and_says_how_to_go_on(
    runs: FakeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.during = on_seed(0, signal.SIGINT, signal.SIGINT)
    assert main(["train", "--out", str(tmp_path)]) == 130
    root = tmp_path / "tiny-seed0"
    assert f"`shardloop train --resume {root}`" in capsys.readouterr().err


def test_signals_do_as_before_once_a_command_has_ended(runs: FakeRuns, tmp_path: Path) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    main(["train", "--out", str(tmp_path)])
    assert [signal.getsignal(number) for number in numbers] == before


def test_what_makes_it_another_run_is_refused_on_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.demand_new()
    write_manifest(folder.manifest, replace(PRESETS["tiny"], out=tmp_path), {})
    before = folder.manifest.read_bytes()
    for flag, value in (("--seed", "3"), ("--grpo.kl-coef", "0.5"), ("--optim.lr", "1e-3")):
        for more in ([], ["--check"]):
            code = main(["train", "--resume", str(folder.root), flag, value, *more])
            errors = capsys.readouterr().err
            assert code == 2 and flag.removeprefix("--") + "=" in errors, errors
    assert folder.manifest.read_bytes() == before
    arguments = ["train", "--resume", str(folder.root), "--steps", "9", "--check"]
    assert main(arguments) == 0
    assert "9 steps of 16 prompts" in capsys.readouterr().out


def test_a_row_shows_signal_and_the_time_and_stands_under_its_header() -> None:
    metrics = {
        **{"step": 3, "reward": 0.5, "zero_signal_fraction": 0.75},
        **{"step_s": 1.5, "elapsed_s": 3725.9, "seconds": {"sync": 0.25}},
    }
    head, line = header(), row(metrics)
    cells = line.split()
    assert cells[:8] == ["3", "0.500", "25%", "-", "-", "-", "1.50", "1:02:05"]
    assert head.index("elapsed") + len("elapsed") == line.index("1:02:05") + len("1:02:05")
    timed = row({**metrics, "to_go_s": 62.5})
    assert head.index("to go") + len("to go") == timed.rindex("1:02") + len("1:02")
    assert len(head) == len(line) <= 100
    assert header(verbose=True).startswith(head) and "sync" not in head
    assert row(metrics, verbose=True).split()[9:] == ["0.25", *["0.00"] * 5]
    assert [clock(s) for s in (0.9, 61, 3600)] == ["0:00", "1:01", "1:00:00"]


@pytest.mark.parametrize(
    ("arguments", "label"),
    [
        ([], "tiny"),
        (["--task", "sort"], "tiny"),
        (["--task", "games:task"], "tiny-games-task"),
        (["--preset=calculator", "--task=data/my questions.jsonl"], "calculator-my-questions"),
        (["--model", "models/qwen", "--task", "sort"], "qwen-sort"),
    ],
)
def test_a_run_is_named_by_its_preset_and_by_a_task_that_is_not_the_presets(
    arguments: list[str], label: str
) -> None:
    assert command.starting_config(arguments)[1] == label


def test_the_report_in_a_terminal_has_no_picture(
    runs: FakeRuns, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def picture(config: TrainConfig) -> None:
        report = f"report of seed {config.seed}\n\n![reward](curve.png)\n"
        (tmp_path / "tiny-seed0" / "report.md").write_text(report)

    runs.after = picture
    assert main(["train", "--quiet", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "report of seed 0\n"


def test_the_time_to_go_counts_what_lies_between_steps_and_only_what_was_seen() -> None:
    """A resumed run begins at step 5 of 9, after an hour of earlier work."""
    pace = Pace()
    seen = [(5, 3604.0, 4.0), (6, 3606.0, 2.0), (7, 3615.0, 1.0)]
    left = [pace.to_go_s(n, 9, {"elapsed_s": at, "step_s": took}) for n, at, took in seen]
    assert left == [4 * 4.0, 3 * 6.0 / 2, 2 * 15.0 / 3]
    assert pace.to_go_s(9, 9, {"elapsed_s": 3700.0, "step_s": 1.0}) == 0.0
