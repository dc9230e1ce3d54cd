"""What a finished run says of itself: a table with intervals, and a curve. Floor 4.

`write_report` is called at the end of `controller.run`, `seeds_report` by the command line. Both
read only what lies in the run's folder (see `controller.rundir`), so a report can be made again.

Keys read, each optional but `step`:

    metrics.jsonl   step, reward, kl, gap_mean, gap_max, tokens_per_s
    evals.jsonl     step, prompts, greedy, sampled, greedy_std, sampled_std   (`controller.evals`)
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardloop.config import to_dict
from shardloop.controller.curve import draw_curve, series
from shardloop.controller.evals import Record, before_and_after, eval_interval
from shardloop.controller.rundir import RunFolder
from shardloop.errors import UsageError
from shardloop.intervals import t_interval
from shardloop.metrics import read_jsonl, writing

MEASURES = {"greedy": "held-out reward, greedy", "sampled": "held-out reward, sampled"}
ENDS = 10
"""Steps at each end of a run whose mean training reward is compared."""
DASH = "–"


def write_report(folder: RunFolder) -> Path:
    """Writes `report.md` and `curve.png` from what the run has recorded so far.

    Raises:
        UsageError: no step is recorded yet. CheckpointError: the files cannot be written.
    """
    metrics, evals = read_jsonl(folder.metrics), read_jsonl(folder.evals)
    if not metrics:
        raise UsageError(f"{folder.root}: no steps in metrics.jsonl; there is nothing to report")
    with writing(folder.curve):
        draw_curve(metrics, folder.curve, evals=evals)
    parts = [
        f"# {folder.root.name}",
        _headline(folder),
        _eval_table(evals),
        _training_table(metrics),
        f"![reward, KL and log-prob gap by step]({folder.curve.name})",
    ]
    with writing(folder.report):
        folder.report.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return folder.report


def seeds_report(run_dirs: Sequence[Path]) -> str:
    """A table over runs that differ in their seed: each one's before and after, and their mean.

    Raises:
        UsageError: no folders, one that is no run or has no evaluation before and after, or runs
            that differ in more than their seed.
    """
    if not run_dirs:
        raise UsageError("no runs to report on; give one or more run folders")
    configs = [_config_without_seed(RunFolder(root)) for root in run_dirs]
    if any(config != configs[0] for config in configs):
        raise UsageError("the runs differ in more than their seed; report on them apart")
    ends = [_ends_of(root) for root in run_dirs]
    measures = [m for m in MEASURES if all(m in record for pair in ends for record in pair)]
    values = [[float(record[m]) for m in measures for record in pair] for pair in ends]
    rows = [
        [root.name, *(f"{value:.3f}" for value in row)]
        for root, row in zip(run_dirs, values, strict=True)
    ]
    if len(run_dirs) > 1:
        intervals = [str(t_interval(column)) for column in zip(*values, strict=True)]
        rows.append([f"mean of {len(run_dirs)} [95 %, t]", *intervals])
    return _table(["run", *(f"{m} {w}" for m in measures for w in ("before", "after"))], rows)


def _ends_of(root: Path) -> tuple[Record, Record]:
    ends = before_and_after(read_jsonl(RunFolder(root).evals))
    if ends is None:
        raise UsageError(f"{root}: no evaluation before and after training in evals.jsonl")
    return ends


def _config_without_seed(folder: RunFolder) -> dict[str, Any]:
    config = to_dict(folder.read_config())
    return {key: value for key, value in config.items() if key not in ("seed", "name", "out")}


def _headline(folder: RunFolder) -> str:
    config = folder.read_config()
    return (
        f"Model {config.model}, task {config.task}, seed {config.seed}: GRPO of"
        f" {config.grpo.prompts_per_step} prompts × {config.grpo.samples_per_prompt} samples,"
        f" learning rate {config.optim.lr:g}, trainer {config.trainer.layout},"
        f" engine {config.engine.layout}."
    )


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


def _training_table(metrics: Sequence[Record]) -> str:
    rewards = series(metrics, "reward")[1]
    rows = [["steps", str(metrics[-1]["step"])]]
    if rewards:
        ends = (statistics.fmean(rewards[:ENDS]), statistics.fmean(rewards[-ENDS:]))
        span = min(ENDS, len(rewards))
        rows.append(
            [f"training reward, first → last {span} steps", f"{ends[0]:.3f} → {ends[1]:.3f}"]
        )
    for label, key, pick, form in (
        ("KL to the starting policy, last step", "kl", lambda v: v[-1], ".4f"),
        ("log-prob gap of engine and trainer, mean", "gap_mean", statistics.fmean, ".1e"),
        ("log-prob gap of engine and trainer, largest", "gap_max", max, ".1e"),
        ("tokens a second, median", "tokens_per_s", statistics.median, ".0f"),
    ):
        values = series(metrics, key)[1]
        rows.append([label, format(pick(values), form) if values else DASH])
    return _table(["over the run", ""], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up in a terminal."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])
