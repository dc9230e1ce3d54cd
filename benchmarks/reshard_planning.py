"""Planning at the size of public models, by shapes alone: time, memory, growth, evenness.

Called by `benchmarks.reshard`. Every case is planned in fresh processes: `rounds` for the times,
one for the peak of memory (the tracing makes it slow), one for what the plan moves. Layouts are
built, the plan is made and proved on one core.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import reshard_cases as cases
from benchmarks import reshard_planners as planners
from benchmarks.goals import Goal, as_json, show
from benchmarks.measure import MIB, print_table
from benchmarks.reshard_cases import Case, in_fresh_process

GOAL_S, GOAL_MIB, GOAL_LIST_MS = 0.5, 50, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    cases: Sequence[Case]
    rounds: int
    tensors: Sequence[tuple[int, int]]
    """Layers and experts of DeepSeek-V3 as it grows."""
    replicas: Sequence[int]
    widths: Sequence[int]
    """Ranks of fsdp."""
    small: Case
    """What a loop over all pairs and DCP's planner can do."""
    dense: Case
    """What can be written out record by record."""
    large: Case
    """What their times are extrapolated to."""


LARGE = Case(model="DeepSeek-V3", src=cases.MEGATRON2048, dst=cases.ENGINES2048)
SMALL = Case(model="Llama-3-70B", src=cases.FSDP64, dst=cases.ENGINE8)
SMOKE = Size(
    cases=cases.SMOKE,
    rounds=1,
    tensors=[(16, 64), (32, 64)],
    replicas=[1, 2],
    widths=[4, 8],
    small=Case(model="Llama-3.1-8B", src="fsdp=4", dst="engine:tp=2"),
    dense=Case(model="Llama-3.1-8B", src="fsdp=4", dst="engine:tp=2"),
    large=cases.SMOKE[1],
)
QUICK = Size(
    cases=cases.QUICK,
    rounds=3,
    tensors=[(16, 64), (61, 256), (244, 1024)],
    replicas=[1, 16, 256],
    widths=[512, 2048, 8192],
    small=SMALL,
    dense=SMALL,
    large=LARGE,
)
FULL = Size(
    cases=cases.FULL,
    rounds=5,
    tensors=[(16, 64), (32, 128), (61, 256), (122, 512), (244, 1024)],
    replicas=[1, 4, 16, 64, 256],
    widths=[512, 1024, 2048, 4096, 8192],
    small=SMALL,
    dense=SMALL,
    large=LARGE,
)


def run(size: Size) -> dict[str, Any]:
    rows = [_row(case, size.rounds) for case in size.cases]
    growth = {
        "tensors": _growth(
            cases.growth_in_tensors(size.tensors), "num_tensors", size.rounds, label="tensors"
        ),
        "destination ranks": _growth(
            cases.growth_in_ranks(size.replicas), "num_dst_ranks", size.rounds, label="ranks"
        ),
        "fsdp ranks": _growth(
            cases.growth_in_width(size.widths), "num_src_ranks", size.rounds, label="ranks"
        ),
    }
    results = {
        "rows": rows,
        "growth": growth,
        "others": _others(size),
    }
    return results | {"goals": as_json(_goals(rows, growth))}


def _row(case: Case, rounds: int) -> dict[str, Any]:
    times = [in_fresh_process(cases.times_of, case) for _ in range(rounds)]
    totals = [sum(one["ms"].values()) for one in times]
    typical = times[totals.index(statistics.median_low(totals))]
    return {
        "case": asdict(case),
        "name": str(case),
        **typical,
        "total_ms": sorted(totals),
        "list_ms": {
            side: statistics.median(one["list_ms"][side] for one in times)
            for side in ("receive", "send")
        },
        "peak_mib": in_fresh_process(cases.peak_bytes, case) / MIB,
        "moved": in_fresh_process(cases.moved, case),
    }


def _growth(series: Sequence[Case], count: str, rounds: int, *, label: str) -> dict[str, Any]:
    """Times of a series of cases, and the exponent e of time ~ count**e through the logarithms."""
    times = [[in_fresh_process(cases.times_of, case) for case in series] for _ in range(rounds)]
    points = [
        (points_of[0][count], statistics.median(sum(one["ms"].values()) for one in points_of))
        for points_of in zip(*times, strict=True)
    ]
    logs = [(math.log(number), math.log(ms)) for number, ms in points]
    slope = statistics.linear_regression(*zip(*logs, strict=True)).slope
    return {"label": label, "points": points, "exponent": slope}


def _others(size: Size) -> dict[str, Any]:
    """Other planners at a size they can do; by their rates, what the large case would take."""
    large = in_fresh_process(cases.times_of, size.large)
    large |= in_fresh_process(cases.moved, size.large)
    ours_ms = sum(large["ms"].values())
    num_pairs = large["num_tensors"] * large["num_src_ranks"] * large["num_dst_ranks"]
    loop = in_fresh_process(planners.all_pairs, size.small)
    records = in_fresh_process(planners.per_record, size.dense)
    dcp = [in_fresh_process(planners.dcp, size.small) for _ in range(size.rounds)]
    loop_s = loop["us_per_pair"] * num_pairs / 1e6
    records_s = records["us_per_record"] * large["num_transfers"] / 1e6
    return {
        "small": str(size.small),
        "large": str(size.large),
        "ours_large_ms": ours_ms,
        "all_pairs": loop | {"large_pairs": num_pairs, "large_s": loop_s},
        "per_record": records | {"large_records": large["num_transfers"], "large_s": records_s},
        "dcp": {
            "dcp_s": statistics.median(one["dcp_s"] for one in dcp),
            "ours_s": statistics.median(one["ours_s"] for one in dcp),
            "dcp_to_ours": statistics.median(one["dcp_s"] / one["ours_s"] for one in dcp),
            "num_reads": dcp[0]["num_reads"],
        },
    }


def _goals(rows: Sequence[dict[str, Any]], growth: dict[str, Any]) -> list[Goal]:
    lists = max(max(row["list_ms"].values()) for row in rows)
    slowest = max(statistics.median(row["total_ms"]) for row in rows) / 1e3
    return [
        Goal(what="slowest build + plan + proof", value=slowest, limit=GOAL_S, unit=" s"),
        Goal(what="most memory", value=max(r["peak_mib"] for r in rows), limit=GOAL_MIB,
             unit=" MiB"),
        Goal(what="worst rank's list", value=lists, limit=GOAL_LIST_MS, unit=" ms"),
        Goal(what="bytes / minimum, worst", value=max(r["moved"]["to_minimum"] for r in rows),
             limit=1.0),
        Goal(what="busiest sender / lower bound, worst",
             value=max(r["moved"]["busiest_to_bound"] for r in rows), limit=1.05),
        Goal(what="exponent in tensors", value=growth["tensors"]["exponent"], limit=0.1),
        Goal(what="exponent in destination ranks",
             value=growth["destination ranks"]["exponent"], limit=0.1),
        Goal(what="exponent in fsdp ranks", value=growth["fsdp ranks"]["exponent"], limit=1.0),
    ]  # fmt: skip


HEADERS = [
    "model and layouts", "build+plan+verify ms", "records", "peak MiB", "receives/sends ms",
    "bytes/minimum", "busiest/bound", "replan/first",
]  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table, as `HEADERS` says."""
    parts = [row["ms"][name] for name in ("build", "plan", "verify")]
    moved, replan = row["moved"], row["replan"]
    return [
        row["name"],
        f"{' + '.join(f'{ms:.0f}' for ms in parts)} = {sum(parts):.0f}",
        f"{row['records']:,}",
        f"{row['peak_mib']:.1f}",
        f"{row['list_ms']['receive']:.0f} / {row['list_ms']['send']:.0f}",
        f"{moved['to_minimum']:.4f}",
        f"{moved['busiest_to_bound']:.4f}",
        f"{replan['to_first']:.2f}" if replan else "-",
    ]


def sentences(results: dict[str, Any]) -> list[str]:
    """What the tables do not say."""
    others, lines = results["others"], []
    for name, growth in results["growth"].items():
        points = ", ".join(f"{number:,} in {ms:.0f} ms" for number, ms in growth["points"])
        lines.append(f"growth in {name}: {points}; exponent {growth['exponent']:.2f}")
    loop, records, dcp = (others[name] for name in ("all_pairs", "per_record", "dcp"))
    return [
        *lines,
        f"a loop over all pairs takes {loop['seconds']:.2f} s for the {loop['num_pairs']:,} pairs "
        f"of {others['small']}; at {loop['us_per_pair']:.2f} us a pair, extrapolated, "
        f"{loop['large_s']:,.0f} s for the {loop['large_pairs']:.2g} pairs of {others['large']}, "
        f"which ours plans and proves in {others['ours_large_ms']:.0f} ms",
        f"a Python object per record takes {records['us_per_record']:.1f} us "
        f"({records['num_records']:,} records written out); extrapolated, "
        f"{records['large_s']:,.1f} s for the {records['large_records']:,} records there",
        f"DCP's planner takes {dcp['dcp_s']:.2f} s for the global plan and one rank's "
        f"{dcp['num_reads']:,} reads of {others['small']}, {dcp['dcp_to_ours']:.1f} times ours "
        f"({dcp['ours_s']:.3f} s with layouts, proof and that rank's list)",
    ]


def report(results: dict[str, Any]) -> None:
    print_table(HEADERS, [cells(row) for row in results["rows"]])
    for line in sentences(results):
        print(line)
    show(results["goals"])
