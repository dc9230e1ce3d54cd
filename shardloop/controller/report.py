"""What a finished run says of itself: a table with intervals, and a curve. Floor 4.

`write_report` is called at the end of `controller.run`, the reports over seeds by the command line.
All read only what lies in the folders of runs (see `controller.rundir`), so a report can be made
again.

Keys read, each optional but `step`:

    metrics.jsonl   step, reward, update, kl, gap_mean, gap_max, tokens_per_s, elapsed_s
    evals.jsonl     step, prompts, greedy, sampled, greedy_std, sampled_std, elapsed_s
                    (see `controller.evals`)
"""

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardloop.controller.curve import draw_curve, series
from shardloop.controller.evals import Record, before_and_after, eval_interval
from shardloop.controller.manifest import flat_settings, read_manifest
from shardloop.controller.rundir import SEEDS_REPORT, RunFolder, open_run_folder
from shardloop.errors import UsageError
from shardloop.intervals import Interval, t_interval
from shardloop.metrics import read_jsonl, replace_text, writing

MEASURES = {"greedy": "held-out reward, greedy", "sampled": "held-out reward, sampled"}
ENDS = 10
"""Steps at each end of a run whose mean training reward is compared."""
DASH = "–"
PICTURE = "!"
"""Begins the line that shows the curve, where Markdown is shown."""
WIDTH = 100
"""Of sentences, so that they can be read in a terminal."""
INCIDENTAL = ("seed", "name", "out", "track", "checkpoint", "workers")
"""Settings in which runs of one table may differ."""


def write_report(folder: RunFolder) -> Path:
    """Writes `report.md` and `curve.png` from what the run has recorded so far.

    Raises:
        UsageError: no step is recorded yet. CheckpointError: the files cannot be written.
    """
    metrics, evals = read_jsonl(folder.metrics), read_jsonl(folder.evals)
    if not metrics:
        raise UsageError(f"{folder.root}: no steps in metrics.jsonl; there is nothing to report")
    with writing(folder.curve):
        draw_curve(metrics, folder.curve, evals=evals, title=_title(folder))
    parts = [
        f"# {folder.root.name}",
        _headline(folder),
        _eval_table(evals),
        _training_table(metrics, evals),
        f"{PICTURE}[reward, KL and log-prob gap by step]({folder.curve.name})",
    ]
    with writing(folder.report):
        folder.report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return folder.report


def without_picture(report: str) -> str:
    """The text of a report for a terminal."""
    lines = report.splitlines()
    return "\n".join(line for line in lines if not line.startswith(PICTURE)).strip()


def write_seeds_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Writes `seeds_report` into `out`.

    Raises:
        UsageError: as there. CheckpointError: it cannot be written.
    """
    path = out / SEEDS_REPORT
    replace_text(path, seeds_report(run_dirs) + "\n")
    return path


def seeds_report(run_dirs: Sequence[Path]) -> str:
    """A table over runs that differ in their seed: each one's before and after, and their mean.

    Raises:
        UsageError: no folders, one twice, one that is no run or has no evaluation before and after,
            or runs that differ in more than their seed.
    """
    if not run_dirs:
        raise UsageError("no runs to report on; give one or more run folders")
    if len({root.resolve() for root in run_dirs}) < len(run_dirs):
        raise UsageError("a run is given twice; it would count as two: give each folder once")
    _demand_same_settings(run_dirs)
    ends = [_ends_of(root) for root in run_dirs]
    measures = [m for m in MEASURES if all(m in record for pair in ends for record in pair)]
    values = [[float(record[m]) for m in measures for record in pair] for pair in ends]
    rows = [
        [root.name, *(f"{value:.3f}" for value in row)]
        for root, row in zip(run_dirs, values, strict=True)
    ]
    note = ""
    if len(run_dirs) > 1:
        binary = [_is_binary(m, ends) for m in measures for _ in ("before", "after")]
        columns = zip(zip(*values, strict=True), binary, strict=True)
        rows.append(
            [
                f"mean of {len(run_dirs)} [95 %, t]",
                *(str(_seeds_interval(column, within_01=within)) for column, within in columns),
            ]
        )
        note = "\n\nIn brackets 95 % intervals over the runs, by Student's t."
    if len(run_dirs) == 2:
        note += "\nWith two runs they are wide: 12.7 standard errors to each side; three have 4.3."
    head = ["run", *(f"{m} {w}" for m in measures for w in ("before", "after"))]
    return _table(head, rows) + note


def _is_binary(measure: str, ends: Sequence[tuple[Record, Record]]) -> bool:
    """Whether every reward was 0 or 1."""
    return not any(f"{measure}_std" in record for pair in ends for record in pair)


def _seeds_interval(values: Sequence[float], *, within_01: bool) -> Interval:
    """A mean of rewards that are 0 or 1 cannot lie outside of them."""
    interval = t_interval(values)
    if not within_01:
        return interval
    return Interval(interval.value, max(0.0, interval.low), min(1.0, interval.high))


def _ends_of(root: Path) -> tuple[Record, Record]:
    ends = before_and_after(read_jsonl(RunFolder(root).evals))
    if ends is None:
        raise UsageError(f"{root}: no evaluation before and after training in evals.jsonl")
    return ends


def _demand_same_settings(run_dirs: Sequence[Path]) -> None:
    settings = [_what_counts(open_run_folder(root)) for root in run_dirs]
    differing = [
        f"{name.replace('_', '-')} is {' and '.join(dict.fromkeys(str(s[name]) for s in settings))}"
        for name in settings[0]
        if any(s[name] != settings[0][name] for s in settings)
    ]
    if differing:
        raise UsageError(
            f"the runs differ in more than their seed: {'; '.join(differing)}. Report on them apart"
        )


def _what_counts(folder: RunFolder) -> dict[str, Any]:
    """The settings without the seed, where the run lies, and what its numbers do not depend on."""
    settings = flat_settings(folder.read_config())
    return {key: value for key, value in settings.items() if key.split(".")[0] not in INCIDENTAL}


def _title(folder: RunFolder) -> str:
    config = folder.read_config()
    return f"{folder.root.name}: {config.model} on {config.task}, seed {config.seed}"


def _headline(folder: RunFolder) -> str:
    config = folder.read_config()
    # A task's own reward has its name only in what the run wrote down.
    reward = read_manifest(folder.manifest).get("reward") or config.reward or "the task's own"
    place = "on the trainer's ranks" if config.workers.colocate else "on ranks of its own"
    text = (
        f"Model {config.model}, task {config.task} judged by {reward}, seed {config.seed}: GRPO of"
        f" {config.grpo.prompts_per_step} prompts × {config.grpo.samples_per_prompt} samples,"
        f" learning rate {config.optim.lr:g}, trainer {config.trainer.layout},"
        f" engine {config.engine.layout} {place}."
    )
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _eval_table(evals: Sequence[Record]) -> str:
    ends = before_and_after(evals)
    if ends is None:
        return "Held-out reward was not measured both before and after training."
    rows = [
        [label, *(str(eval_interval(record, measure)) for record in ends)]
        for measure, label in MEASURES.items()
        if all(measure in record for record in ends)
    ]
    note = (
        f"\n\n{ends[1]['prompts']} held-out prompts, the same before and after; in brackets 95 %"
        " intervals over the prompts."
    )
    return _table(["", "before", f"after step {ends[1]['step']}"], rows) + note


def _training_table(metrics: Sequence[Record], evals: Sequence[Record]) -> str:
    rows = [["steps", str(metrics[-1]["step"])], _updates_row(metrics), _ends_row(metrics)]
    for label, key, pick, form in (
        ("KL to the starting policy, last step", "kl", lambda v: v[-1], ".4f"),
        ("log-prob gap of engine and trainer, mean", "gap_mean", statistics.fmean, ".1e"),
        ("log-prob gap of engine and trainer, largest", "gap_max", max, ".1e"),
        ("tokens a second, median", "tokens_per_s", statistics.median, ".0f"),
    ):
        values = series(metrics, key)[1]
        rows.append([label, format(pick(values), form) if values else DASH])
    elapsed = series([*metrics, *evals], "elapsed_s")[1]
    rows.append(["wall time, start and evaluations included", clock(max(elapsed, default=None))])
    return _table(["over the run", ""], rows)


def _updates_row(metrics: Sequence[Record]) -> list[str]:
    """A step whose groups all had equal rewards makes no update."""
    made = series(metrics, "update")[1]
    return ["steps with an update", f"{sum(made):.0f} of {len(made)}" if made else DASH]


def _ends_row(metrics: Sequence[Record]) -> list[str]:
    """Means over two ends of the run that share no step."""
    rewards = series(metrics, "reward")[1]
    span = min(ENDS, len(rewards) // 2)
    if span < 1:
        return ["training reward, first → last steps", "too few steps to compare"]
    first, last = statistics.fmean(rewards[:span]), statistics.fmean(rewards[-span:])
    steps = "step" if span == 1 else f"{span} steps"
    return [f"training reward, first → last {steps}", f"{first:.3f} → {last:.3f}"]


def clock(seconds: float | None) -> str:
    if seconds is None:
        return DASH
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (rest, "s"))
    return " ".join(f"{value} {unit}" for value, unit in parts if value) or "0 s"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up in a terminal."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])
