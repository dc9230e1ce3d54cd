"""Checkpoints: how long a save holds training up and slows it after; loads at other ranks.

Called by `benchmarks.reshard`. The stall of a save in the background stands beside a copy of the
shard, which is all that it must wait for, by the same ranks at the same time. A stall alone hides
the price: the steps that follow are timed with and without the save behind them. On a machine whose
cores are all training, the thread's CPU seconds come out of those steps whatever it does. A load
of ours reads each chunk whole, whatever part a rank needs: only so can its checksum be compared.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from benchmarks.goals import Goal, as_json, show
from benchmarks.measure import Timings, print_table, ratio
from benchmarks.reshard_ranks import Moments
from benchmarks.reshard_saves import STEPS, StateSize, compare_loads, compare_saves
from benchmarks.reshard_transfer import MEMORY, timings_of
from shardloop.config import WorkersConfig
from shardloop.controller.groups import LocalWorkers

TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    state: StateSize
    save_ranks: int
    load_ranks: int
    rounds: int
    places: Sequence[Path]
    """Folders on the file systems to save to."""


SMOKE = Size(
    state=StateSize(num_weights=2, width=64, products=1),
    save_ranks=2,
    load_ranks=1,
    rounds=1,
    places=[MEMORY],
)
QUICK = Size(
    state=StateSize(num_weights=16, width=1024, products=200),
    save_ranks=2,
    load_ranks=3,
    rounds=3,
    places=[MEMORY],
)
FULL = Size(
    state=StateSize(num_weights=64, width=1024, products=400),
    save_ranks=4,
    load_ranks=2,
    rounds=5,
    places=[MEMORY, Path(gettempdir())],
)


def run(size: Size) -> dict[str, Any]:
    rows = [_run_place(size, place) for place in size.places]
    return {"rows": rows, "goals": as_json(goal for row in rows for goal in _goals(row))}


def _run_place(size: Size, place: Path) -> dict[str, Any]:
    with TemporaryDirectory(dir=place, prefix="shardloop-bench-") as name:
        folder = Path(name)
        saves = _on_ranks(
            size.save_ranks, compare_saves, size.state, size.rounds, folder, TIMEOUT_S
        )
        loads = _on_ranks(size.load_ranks, compare_loads, size.state, size.rounds, folder)
    saved = _timings(saves)
    loaded = _timings([rank["moments"] for rank in loads])
    needed = sum(rank["needed"] for rank in loads)
    return {
        "place": str(place),
        "state_bytes": size.state.num_bytes,
        "save_ranks": size.save_ranks,
        "load_ranks": size.load_ranks,
        "saves": {name: asdict(timing) for name, timing in saved.items()},
        "ratios": {
            name: asdict(ratio(_sums(saved, parts), _sums(saved, others)))
            for name, (parts, others) in RATIOS.items()
        },
        "added_s": {
            way: statistics.median(
                own - alone
                for own, alone in zip(
                    _sums(saved, [f"{way}: {part}" for part in ("stall", "steps", "end")]),
                    saved["steps alone"].wall_s,
                    strict=True,
                )
            )
            for way in WAYS
        },
        "loads": {name: asdict(timing) for name, timing in loaded.items()},
        "load_ratio": asdict(ratio(loaded["ours"].wall_s, loaded["dcp.load"].wall_s)),
        "read_to_needed": {
            name: sum(rank["read"][name] for rank in loads) / needed for name in loaded
        },
    }


WAYS = ("ours, background", "dcp.async_save")
RATIOS = {
    "stall / copy": (["ours, background: stall"], ["copy of the shard"]),
    "DCP's stall / copy": (["dcp.async_save: stall"], ["copy of the shard"]),
    "steps after a save / steps alone": (["ours, background: steps"], ["steps alone"]),
    "DCP's steps after a save / steps alone": (["dcp.async_save: steps"], ["steps alone"]),
    "dcp.save / ours at once": (["dcp.save"], ["ours, at once"]),
    "gather + torch.save / ours at once": (["gather + torch.save"], ["ours, at once"]),
}


def _on_ranks(num_ranks: int, function: Any, *args: Any) -> list[Any]:
    with LocalWorkers({"all": range(num_ranks)}, WorkersConfig(timeout_s=TIMEOUT_S)) as workers:
        return workers.run(function, *args, role="all")


def _timings(by_rank: Sequence[Moments]) -> dict[str, Timings]:
    return {name: timings_of([moments[name] for moments in by_rank]) for name in by_rank[0]}


def _sums(timings: dict[str, Timings], names: Sequence[str]) -> list[float]:
    return [sum(parts) for parts in zip(*(timings[name].wall_s for name in names), strict=True)]


def _goals(row: dict[str, Any]) -> list[Goal]:
    ratios, place = row["ratios"], row["place"]
    return [
        Goal(what=f"{place}: {what}", value=value, limit=limit)
        for what, value, limit in (
            ("stall / copy of the shard", ratios["stall / copy"]["median"], 1.2),
            (f"next {STEPS} steps", ratios["steps after a save / steps alone"]["median"], 1.05),
        )
    ]


def title(row: dict[str, Any]) -> str:
    return (
        f"{row['state_bytes'] / 1e6:.0f} MB of weights and moments in {row['place']}, saved by "
        f"{row['save_ranks']} ranks, loaded by {row['load_ranks']}; steps are {STEPS} at a time"
    )


def sentences(row: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {_range(found)}" for name, found in row["ratios"].items()]
    for way, seconds in row["added_s"].items():
        lines.append(f"{way}: {1e3 * seconds:+.0f} ms over stall, next {STEPS} steps and end")
    read = ", ".join(f"{name} {value:.3f}" for name, value in row["read_to_needed"].items())
    return [*lines, f"load, ours / dcp.load: {_range(row['load_ratio'])}; read / needed: {read}"]


def arms(row: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    loads = {f"load, {name}": timing for name, timing in row["loads"].items()}
    return list((row["saves"] | loads).items())


def cells(name: str, timing: dict[str, Any]) -> list[str]:
    return [name, *(f"{1e3 * statistics.median(timing[key]):.1f}" for key in ("wall_s", "cpu_s"))]


HEADERS = ["", "wall ms", "CPU ms"]


def _range(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f}..{found['high']:.2f})"


def report(results: dict[str, Any]) -> None:
    for row in results["rows"]:
        print(f"\n{title(row)}")
        print_table(HEADERS, [cells(*item) for item in arms(row)])
        for line in sentences(row):
            print(line)
    show(results["goals"])
