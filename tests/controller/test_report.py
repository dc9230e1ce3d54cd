"""Reports: intervals that hold what they promise, tables made of the records, a real picture."""

import json
import math
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardloop.builtin import BUILTIN
from shardloop.config import TrainConfig, to_dict
from shardloop.controller.curve import draw_curve, moving_mean
from shardloop.controller.evals import before_and_after, eval_interval, reward_fields
from shardloop.controller.manifest import write_manifest
from shardloop.controller.report import seeds_report, write_report, write_seeds_report
from shardloop.controller.rundir import RunFolder
from shardloop.errors import CheckpointError, UsageError
from shardloop.intervals import t_interval
from shardloop.metrics import append_jsonl, read_jsonl
from shardloop.presets import PRESETS


def make_run(
    root: Path, *, seed: int = 0, greedy: tuple[float, float] = (0.5, 0.75), **changes: Any
) -> Path:
    folder = RunFolder(root)
    root.mkdir(parents=True)
    config = replace(PRESETS["tiny"], seed=seed, **changes)
    folder.manifest.write_text(json.dumps({"config": to_dict(config), "reward": "exact"}))
    steps = [
        {"step": s, "reward": s / 40, "kl": 0.001 * s, "gap_mean": 1e-6, "gap_max": 1e-6 * s}
        | {"update": int(s > 10), "elapsed_s": 123.0 * s}
        for s in range(1, 31)
    ]
    evals = [
        {"step": 0, "prompts": 16, "greedy": greedy[0], "sampled": 0.25},
        {"step": 15, "prompts": 16, "greedy": 0.125, "sampled": 0.125},
        {"step": 30, "prompts": 16, "greedy": greedy[1], "sampled": 0.5},
    ]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in steps))
    folder.evals.write_text("".join(json.dumps(line) + "\n" for line in evals))
    return root


def test_student_interval_of_known_numbers() -> None:
    interval = t_interval([1.0, 2.0, 3.0])
    half = 4.303 * 1.0 / math.sqrt(3)
    assert (interval.value, interval.low, interval.high) == pytest.approx((2, 2 - half, 2 + half))
    with pytest.raises(ValueError, match="1 value; an interval over seeds needs 2 or more"):
        t_interval([1.0])


def test_student_interval_covers_the_mean_19_times_in_20(seed: int) -> None:
    draw = random.Random(seed)
    covered = 0
    for _ in range(4000):
        interval = t_interval([draw.gauss(5.0, 2.0) for _ in range(3)])
        covered += interval.low <= 5.0 <= interval.high
    assert covered / 4000 == pytest.approx(0.95, abs=0.015)


def test_rewards_of_0_and_1_get_the_score_interval_and_others_the_normal_one() -> None:
    binary = {"prompts": 4, **reward_fields("greedy", [1.0, 1.0, 1.0, 1.0])}
    assert binary == {"prompts": 4, "greedy": 1.0}
    interval = eval_interval(binary, "greedy")
    assert interval is not None
    assert interval.high == 1.0
    assert interval.low == pytest.approx(4 / (4 + 1.96**2))
    values = [0.0, 0.5, 2.0]
    graded = {"prompts": 3, **reward_fields("greedy", values)}
    interval = eval_interval(graded, "greedy")
    assert interval is not None
    half = 1.96 * statistics.stdev(values) / math.sqrt(3)
    assert interval.high - interval.value == pytest.approx(half)
    assert eval_interval(graded, "sampled") is None


def test_one_graded_reward_has_an_unbounded_interval_and_is_json(tmp_path: Path) -> None:
    record = json.loads(json.dumps({"step": 0, "prompts": 1, **reward_fields("greedy", [0.3])}))
    interval = eval_interval(record, "greedy")
    assert interval is not None
    assert (interval.low, interval.high) == (-math.inf, math.inf)
    draw_curve([{"step": 1, "reward": 0.3}], tmp_path / "c.png", evals=[record])
    with pytest.raises(ValueError, match="greedy: no rewards"):
        reward_fields("greedy", [])


def test_before_is_the_start_of_rl_and_after_the_newest() -> None:
    evals = [{"step": 0, "n": 1}, {"step": 10, "n": 2}, {"step": 20, "n": 3}]
    assert before_and_after(evals) == (evals[0], evals[2])
    assert before_and_after(evals[:1]) is None
    assert before_and_after(evals[1:]) is None


def test_a_report_shows_before_and_after_with_intervals(tmp_path: Path) -> None:
    path = write_report(RunFolder(make_run(tmp_path / "run-a")))
    assert path == tmp_path / "run-a" / "report.md"
    text = path.read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["", "before", "after step 30"] in rows
    assert ["held-out reward, greedy", "0.500 [0.280, 0.720]", "0.750 [0.505, 0.898]"] in rows
    # Means of 1..10 and of 21..30, over 40.
    assert ["training reward, first → last 10 steps", "0.138 → 0.637"] in rows
    assert ["KL to the starting policy, last step", "0.0300"] in rows
    assert ["log-prob gap of engine and trainer, largest", "3.0e-05"] in rows
    assert ["tokens a second, median", "–"] in rows
    assert ["steps with an update", "20 of 30"] in rows
    assert ["wall time, start and evaluations included", "1 h 1 min 30 s"] in rows
    assert "Model tiny, task sort judged by exact, seed 0" in text
    assert "engine:tp=2 on ranks of its own" in text
    assert (tmp_path / "run-a" / "curve.png").is_file()


def test_a_run_stopped_before_its_last_evaluation_still_has_a_report(tmp_path: Path) -> None:
    folder = RunFolder(make_run(tmp_path / "run"))
    folder.evals.unlink()
    assert "not measured both before and after" in write_report(folder).read_text()
    folder.metrics.write_text("")
    with pytest.raises(UsageError, match=r"no steps in metrics\.jsonl"):
        write_report(folder)


def test_seeds_are_summed_up_by_mean_and_student_interval(tmp_path: Path) -> None:
    afters = (0.75, 0.875, 1.0)
    roots = [
        make_run(tmp_path / f"seed{s}", seed=s, greedy=(0.5, after))
        for s, after in enumerate(afters)
    ]
    lines = seeds_report(roots).splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert rows[0] == ["run", "greedy before", "greedy after", "sampled before", "sampled after"]
    assert rows[2] == ["seed0", "0.500", "0.750", "0.250", "0.500"]
    assert rows[5][0] == "mean of 3 [95 %, t]"
    interval = t_interval(afters)
    assert interval.high > 1.0
    # Rewards of 0 and 1 have no mean above 1.
    assert rows[5][2] == f"0.875 [{interval.low:.3f}, 1.000]"
    assert len({len(line) for line in lines[:6]}) == 1
    assert len(seeds_report(roots[:1]).splitlines()) == 3
    assert "With two runs they are wide" in seeds_report(roots[:2])
    path = write_seeds_report(roots, tmp_path)
    assert path == tmp_path / "seeds-report.md"
    assert path.read_text().rstrip() == seeds_report(roots)


def test_graded_rewards_have_no_bounds_of_0_and_1(tmp_path: Path) -> None:
    roots = [make_run(tmp_path / f"s{s}", seed=s, greedy=(0.5, 0.5 + s)) for s in range(3)]
    for root in roots:
        evals = [{**record, "greedy_std": 0.1} for record in read_jsonl(root / "evals.jsonl")]
        (root / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evals))
    assert str(t_interval([0.5, 1.5, 2.5])) in seeds_report(roots)


def test_a_run_counts_once_and_must_be_there(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run")
    with pytest.raises(UsageError, match="given twice"):
        seeds_report([root, tmp_path / "other" / ".." / "run"])
    with pytest.raises(UsageError, match=r"nosuch: no manifest\.json"):
        seeds_report([root, tmp_path / "nosuch"])


@pytest.mark.parametrize(
    ("num_steps", "cells"),
    [
        (1, ["training reward, first → last steps", "too few steps to compare"]),
        (2, ["training reward, first → last step", "0.000 → 1.000"]),
        (5, ["training reward, first → last 2 steps", "0.500 → 3.500"]),
    ],
)
def test_the_ends_of_a_run_share_no_step(tmp_path: Path, num_steps: int, cells: list[str]) -> None:
    folder = RunFolder(make_run(tmp_path / "run"))
    lines = [json.dumps({"step": s + 1, "reward": s}) + "\n" for s in range(num_steps)]
    folder.metrics.write_text("".join(lines))
    text = write_report(folder).read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert cells in rows


def test_what_cannot_be_written_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    root, tiny = make_run(tmp_path / "run"), PRESETS["tiny"]
    folder = RunFolder(root)
    for path, in_the_way, write in (
        (folder.curve, folder.curve, lambda: write_report(folder)),
        (folder.report, folder.report, lambda: write_report(folder)),
        (folder.metrics, root / ".metrics.jsonl.tmp", lambda: folder.forget_after(10)),
        (folder.manifest, folder.manifest, lambda: write_manifest(folder.manifest, tiny, {})),
        (folder.evals, folder.evals, lambda: append_jsonl(folder.evals, {"step": 40})),
    ):
        in_the_way.unlink(missing_ok=True)
        in_the_way.mkdir()
        with pytest.raises(CheckpointError, match=f"cannot write {path}: .*directory"):
            write()
        in_the_way.rmdir()


def test_runs_of_other_settings_are_not_averaged(tmp_path: Path) -> None:
    roots = [make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=7)]
    with pytest.raises(UsageError, match=r"more than their seed: steps is 150 and 7\. Report"):
        seeds_report(roots)
    RunFolder(roots[0]).evals.write_text("")
    with pytest.raises(UsageError, match="no evaluation before and after"):
        seeds_report(roots[:1])
    with pytest.raises(UsageError, match="no runs"):
        seeds_report([])


def test_moving_mean_uses_only_the_past() -> None:
    assert moving_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_the_curve_is_a_picture_with_ink_in_every_panel(tmp_path: Path) -> None:
    from matplotlib.image import imread

    root = make_run(tmp_path / "run")
    write_report(RunFolder(root))
    pixels = imread(root / "curve.png")[..., :3]
    assert pixels.shape == (960, 960, 3)
    for name, rgb in {
        "training": (0x1F, 0x77, 0xB4),
        "held out": (0xFF, 0x7F, 0x0E),
        "kl": (0x2C, 0xA0, 0x2C),
        "gap": (0xD6, 0x27, 0x28),
    }.items():
        near = abs(pixels * 255 - rgb).max(axis=-1) < 3
        assert near.sum() > 100, name


def test_a_curve_without_kl_and_without_gap_can_be_drawn(tmp_path: Path) -> None:
    zero_gap = [{"step": s, "reward": 0.5, "gap_mean": 0.0, "gap_max": 0.0} for s in range(1, 4)]
    draw_curve(zero_gap, tmp_path / "exact.png")
    assert (tmp_path / "exact.png").stat().st_size > 5000


def test_presets_are_configs_that_fit_their_model() -> None:
    assert set(PRESETS) == {"tiny", "smollm2", "calculator"}
    for preset in PRESETS.values():
        assert isinstance(preset, TrainConfig)
        assert preset.model in BUILTIN
