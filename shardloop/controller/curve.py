"""The picture of a run: reward, KL, and the gap between engine and trainer, by step. Floor 4.

Called by `controller.report` and by notebooks; reads the records of metrics.jsonl and evals.jsonl.
"""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardloop.controller.evals import Record, eval_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 10
"""Steps over which the training reward is averaged."""


def series(records: Sequence[Record], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the records that have `key`."""
    having = [record for record in records if record.get(key) is not None]
    return [int(r["step"]) for r in having], [float(r[key]) for r in having]


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and the up to `window - 1` before it."""
    return [
        statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)
    ]


def draw_curve(
    metrics: Sequence[Record], path: Path, *, evals: Sequence[Record] = (), title: str = ""
) -> None:
    """Draws reward, KL and the gap between engine and trainer by step, as a PNG."""
    # Loaded here: it takes a third of a second, and no other command needs it.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 8), dpi=120, layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    figure.suptitle(title)
    _draw_rewards(top, metrics, evals)
    _draw_kl(middle, metrics)
    _draw_gap(bottom, metrics)
    bottom.set_xlabel("step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_rewards(axes: "Axes", metrics: Sequence[Record], evals: Sequence[Record]) -> None:
    steps, rewards = series(metrics, "reward")
    axes.plot(steps, rewards, ".", color="tab:blue", alpha=0.3, label="training, each step")
    axes.plot(
        steps,
        moving_mean(rewards, WINDOW),
        color="tab:blue",
        label=f"training, mean of {WINDOW} steps",
    )
    measured = [(record, eval_interval(record, "greedy")) for record in evals]
    points = [(record["step"], i.value, i.low, i.high) for record, i in measured if i is not None]
    if points:
        at, values, lows, highs = zip(*points, strict=True)
        errors = (
            [_bar(v - low) for v, low in zip(values, lows, strict=True)],
            [_bar(high - v) for v, high in zip(values, highs, strict=True)],
        )
        axes.errorbar(
            at,
            values,
            yerr=errors,
            fmt="o-",
            color="tab:orange",
            capsize=3,
            label="held out, greedy; bars 95 %",
        )
    axes.set_ylabel("reward")
    _legend_above(axes)


def _bar(length: float) -> float:
    """A single prompt has no spread to show."""
    return length if math.isfinite(length) else 0.0


def _draw_kl(axes: "Axes", metrics: Sequence[Record]) -> None:
    axes.set_ylabel("KL to start\n(nats per token)")
    steps, values = series(metrics, "kl")
    if not values:
        axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
    axes.plot(steps, values, color="tab:green")


def _draw_gap(axes: "Axes", metrics: Sequence[Record]) -> None:
    axes.set_ylabel("log-prob gap,\n|engine − trainer|")
    positive = False
    for key, label, line in (("gap_max", "largest", ":"), ("gap_mean", "mean", "-")):
        steps, values = series(metrics, key)
        positive = positive or any(value > 0 for value in values)
        axes.plot(steps, values, line, color="tab:red", label=label)
    if positive:
        axes.set_yscale("log")
    _legend_above(axes)


def _legend_above(axes: "Axes") -> None:
    """Outside of the panel, where it hides no point."""
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), frameon=False, ncols=3)
