"""How a run looks in a terminal: one row per step, a bar where there is a terminal. Floor 5."""

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from typing import Any

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardloop.controller import events


def clock(seconds: float) -> str:
    """As 1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# name, width, how a value looks, key in the metrics of a step (signal and to_go_s are the view's)
COLUMNS: tuple[tuple[str, int, Callable[[Any], str], str], ...] = (
    ("step", 5, str, "step"),
    ("reward", 7, "{:.3f}".format, "reward"),
    ("signal", 6, "{:.0%}".format, "signal"),
    ("kl", 8, "{:.4f}".format, "kl"),
    ("gap", 8, "{:.1e}".format, "gap_mean"),
    ("gap max", 8, "{:.1e}".format, "gap_max"),
    ("step s", 7, "{:.2f}".format, "step_s"),
    ("elapsed", 8, clock, "elapsed_s"),
    ("to go", 8, clock, "to_go_s"),
)
PHASES = ("sync", "rollout", "score", "advantage", "recompute", "update")
HEADER_EVERY = 25


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # `cli.main` ends the program quietly


class Pace:
    """Time to go by the mean of the steps seen so far, with what lies between them."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def to_go_s(self, step: int, total: int, metrics: Mapping[str, Any]) -> float:
        """Seconds for the rest of the steps, when `step` is done.

        The first step seen has nothing before it to compare with: it counts as it is.
        """
        elapsed_s = float(metrics["elapsed_s"])
        if self._first is None:
            self._first = (step - 1, elapsed_s - float(metrics["step_s"]))
        first_step, first_s = self._first
        return (total - step) * (elapsed_s - first_s) / (step - first_step)


class View:
    """Shows the events of a run. Use as a context manager.

    `quiet` shows results only; `verbose` adds the seconds of each phase to a step.
    """

    def __init__(self, *, quiet: bool, verbose: bool = False) -> None:
        self.console = _Console(highlight=False)
        self._quiet = quiet
        self._verbose = verbose
        self._rows = 0
        self._pace = Pace()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=quiet or not self.console.is_terminal,
        )
        self._stages: dict[str, Any] = {}

    def __enter__(self) -> "View":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, event: events.Event) -> None:
        match event:
            case events.Note(text):
                self._line(text)
            case events.Saved(what, path):
                self._line(f"{what}: {path}")
            case events.Evaluated(step, metrics):
                self._line(evaluation_line(step, metrics))
            case events.Progress(stage, step, total, metrics):
                self._progress(stage, step, total, metrics)

    def _progress(self, stage: str, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        if stage not in self._stages:
            self._stages[stage] = self._bar.add_task(stage, total=total)
        self._bar.update(self._stages[stage], completed=step)
        if stage == "train":
            if self._rows % HEADER_EVERY == 0:
                self._line(header(verbose=self._verbose))
            self._rows += 1
            told = {**metrics, "to_go_s": self._pace.to_go_s(step, total, metrics)}
            self._line(row(told, verbose=self._verbose))
        elif step == total or step % max(1, total // 5) == 0:
            self._line(f"{stage} {step}/{total}  loss {metrics['loss']:.3f}")

    def _line(self, text: str) -> None:
        if not self._quiet:
            self.console.print(text, markup=False, soft_wrap=True)


def show(
    happening: Generator[events.Event, None, None], *, quiet: bool, verbose: bool = False
) -> None:
    """Follows a run to its end; it is closed, and its workers with it, however this ends."""
    with View(quiet=quiet, verbose=verbose) as view, closing(happening):
        for event in happening:
            view.show(event)


def header(*, verbose: bool = False) -> str:
    names = " ".join(f"{name:>{width}}" for name, width, _, _ in COLUMNS)
    return f"{names}  of it: {' '.join(PHASES)}" if verbose else names


def row(metrics: Mapping[str, Any], *, verbose: bool = False) -> str:
    """One step as a line; a metric the run does not have is a dash.

    `signal` is the share of its groups that can teach: whose rewards differ.
    """
    told = {**metrics, "signal": 1.0 - metrics["zero_signal_fraction"]}
    values = [(width, look, told.get(key)) for _, width, look, key in COLUMNS]
    cells = [f"{'-' if value is None else look(value):>{width}}" for width, look, value in values]
    if verbose:
        seconds = metrics["seconds"]
        cells += ["", *(f"{seconds.get(phase, 0.0):.2f}" for phase in PHASES)]
    return " ".join(cells)


def evaluation_line(step: int, metrics: Mapping[str, Any]) -> str:
    return (
        f"held-out after step {step}: greedy {metrics['greedy']:.3f}, "
        f"sampled {metrics['sampled']:.3f} ({metrics['prompts']} prompts)"
    )


def set_up_logging(*, verbose: bool) -> None:
    """Library log lines go to stderr; warnings and worse, or all of ours with `verbose`."""
    console = Console(stderr=True, highlight=False)
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_path=False)],
    )
    logging.getLogger("shardloop").setLevel(logging.INFO if verbose else logging.WARNING)
