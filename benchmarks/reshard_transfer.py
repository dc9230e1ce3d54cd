"""Transfers between real processes of this machine, beside other ways and the machine's limits.

Called by `benchmarks.reshard`. Wall seconds of an arm in a round: from the first rank's begin to
the last one's end. There are more ranks than cores, so ranks that could work at the same time
elsewhere take turns here; that is so for every arm and limit.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.goals import Goal, as_json, show
from benchmarks.measure import MIB, Timings, print_table, ratio
from benchmarks.reshard_ranks import Case, compare_arms
from shardloop.config import WorkersConfig
from shardloop.controller.groups import LocalWorkers
from shardloop.reshard.cost import cost
from shardloop.transport.base import BUCKET_BYTES

MEMORY = Path("/dev/shm")
TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    config: Mapping[str, Any]
    """Of a Llama-shaped model with grouped queries."""
    cases: Sequence[Case]
    rounds: int


def llama(*, layers: int, width: int, ffn: int, vocab: int, heads: int, kv_heads: int) -> dict:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": width,
        "intermediate_size": ffn, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": width // heads, "vocab_size": vocab, "tie_word_embeddings": False,
    }  # fmt: skip


CASES = [
    Case(src="fsdp=2", dst="engine:tp=2"),
    Case(src="fsdp=4", dst="engine:tp=4"),
    Case(src="fsdp=2", dst="engine:tp=2", same_ranks=True),
    Case(src="fsdp=1", dst="engine:tp=1", num_replicas=3),
]
SMOKE = Size(
    config=llama(layers=2, width=64, ffn=96, vocab=256, heads=8, kv_heads=4),
    cases=[CASES[0], CASES[2], CASES[3]],
    rounds=1,
)
QUICK = Size(
    config=llama(layers=3, width=512, ffn=1408, vocab=16_384, heads=8, kv_heads=8),
    cases=CASES,
    rounds=5,
)
FULL = Size(
    config=llama(layers=6, width=1024, ffn=2816, vocab=16_384, heads=16, kv_heads=8),
    cases=[*CASES, Case(src="fsdp=2,tp=2", dst="engine:tp=4")],
    rounds=7,
)


def run(size: Size) -> dict[str, Any]:
    rows = [_run_case(size, case) for case in size.cases]
    return {"cases": rows, "goals": as_json(goal for row in rows for goal in _goals(row))}


def _run_case(size: Size, case: Case) -> dict[str, Any]:
    plan = case.plan(size.config)
    roles = {"src": plan.src_ranks, "dst": plan.dst_ranks}
    counted = cost(plan, itemsize=2)
    config = WorkersConfig(timeout_s=TIMEOUT_S * (1 + size.rounds))
    with (
        TemporaryDirectory(dir=MEMORY, prefix="shardloop-bench-") as folder,
        LocalWorkers(roles, config) as workers,
    ):
        by_rank = workers.run(
            compare_arms, case, dict(size.config), size.rounds, Path(folder), role=list(roles)
        )
    names = list(by_rank[0])
    timings = {name: timings_of([rank[name]["moments"] for rank in by_rank]) for name in names}
    arms = {
        name: _arm([rank[name] for rank in by_rank], timings[name], timings["ours, shm"])
        for name in names
    }
    for name, arm in arms.items():
        if arm["bytes_sent"] is not None:
            arm["to_minimum"] = arm["bytes_sent"] / max(1, counted.minimum_bytes)
        limit = LIMIT_OF.get(name)
        if limit:
            arm["limit"] = limit
            arm["to_limit"] = asdict(ratio(timings[name].wall_s, timings[limit].wall_s))
    shm, as_they_lie = timings["ours, shm"].wall_s, timings["limit: as they lie"].wall_s
    arms["ours, shm"]["to_own_places"] = ratio(shm, as_they_lie).median
    return {
        "name": str(case),
        "num_ranks": len(by_rank),
        "num_replicas": case.num_replicas,
        "weight_bytes": plan.src.model.num_bytes(2),
        "minimum_bytes": counted.minimum_bytes,
        "local_bytes": counted.local_bytes,
        "planned_s": max(rank[names[0]]["planned_s"] for rank in by_rank),
        "arms": arms,
    }


LIMIT_OF = {
    "ours, shm": "limit: shared memory",
    "ours, p2p": "limit: TCP loopback",
}


def timings_of(by_rank: Sequence[Sequence[tuple[float, float, float]]]) -> Timings:
    """From the first to begin to the last to end, and the CPU seconds of all."""
    rounds = list(zip(*by_rank, strict=True))
    wall = tuple(max(m[1] for m in ranks) - min(m[0] for m in ranks) for ranks in rounds)
    return Timings(wall_s=wall, cpu_s=tuple(sum(m[2] for m in ranks) for ranks in rounds))


def _arm(by_rank: Sequence[dict[str, Any]], timing: Timings, ours: Timings) -> dict[str, Any]:
    sent = [rank["bytes_sent"] for rank in by_rank]
    staged = [rank["staged"] for rank in by_rank]
    return {
        "timings": asdict(timing),
        "wall_ratio": asdict(ratio(timing.wall_s, ours.wall_s)),
        "cpu_ratio": asdict(ratio(timing.cpu_s, ours.cpu_s)),
        "prepared_s": max(rank["prepared_s"] for rank in by_rank),
        "rise": max(rank["rise"] for rank in by_rank),
        "bytes_sent": None if None in sent else sum(sent),
        "busiest_bytes": None if None in sent else max(sent),
        "staged_buckets": None if None in staged else max(staged) / BUCKET_BYTES,
    }


def _goals(row: dict[str, Any]) -> list[Goal]:
    arms, name = row["arms"], row["name"]

    def goal(what: str, value: float, limit: float, *, at_least: bool = False) -> Goal:
        return Goal(what=f"{name}: {what}", value=value, limit=limit, at_least=at_least)

    ours = [arm for title, arm in arms.items() if title in LIMIT_OF]
    goals = [
        goal("bytes / minimum", max(arm["to_minimum"] for arm in ours), 1.0),
        goal("shm / shared-memory copy", arms["ours, shm"]["to_limit"]["median"], 1.25),
        goal("shm / the elements copied as they lie", arms["ours, shm"]["to_own_places"], 1.25),
        goal("p2p / loopback", arms["ours, p2p"]["to_limit"]["median"], 1.4),
        goal("staged buckets of a rank", max(arm["staged_buckets"] for arm in ours), 2),
    ]
    for title, least in (("full_tensor + broadcast", 4), ("dcp.save + dcp.load", 6)):
        if title in arms:
            value = arms[title]["wall_ratio"]["median"]
            goals.append(goal(f"{title} / shm", value, least, at_least=True))
    if "ours, relay" in arms:
        relayed, direct = (arms[title]["busiest_bytes"] for title in ("ours, relay", "ours, p2p"))
        value = direct / relayed
        goals.append(
            goal("busiest sender, direct / relay", value, row["num_replicas"], at_least=True)
        )
    return goals


HEADERS = [
    "arm", "wall ms", "CPU ms", "arm/ours (shm)", "of its limit", "bytes/minimum", "prepare ms",
    "buckets staged", "extra MiB",
]  # fmt: skip


def cells(name: str, arm: dict[str, Any]) -> list[str]:
    """A row of a case's table, as `HEADERS` says; empty where nothing was counted."""
    wall, cpu = (1e3 * statistics.median(arm["timings"][key]) for key in ("wall_s", "cpu_s"))
    limit, staged = arm.get("to_limit"), arm["staged_buckets"]
    return [
        name,
        f"{wall:.1f}",
        f"{cpu:.1f}",
        _range(arm["wall_ratio"]),
        _range(limit) if limit else "",
        f"{arm['to_minimum']:.3f}" if "to_minimum" in arm else "",
        f"{1e3 * arm['prepared_s']:.0f}",
        "" if staged is None else f"{staged:.1f}",
        f"{arm['rise'] / MIB:.1f}",
    ]


def _range(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['low']:.2f}..{found['high']:.2f})"


def title(row: dict[str, Any]) -> str:
    return (
        f"{row['name']}, {row['num_ranks']} processes: weights {row['weight_bytes'] / 1e6:.0f} MB, "
        f"on the wire at least {row['minimum_bytes'] / 1e6:.0f} MB, kept in place "
        f"{row['local_bytes'] / 1e6:.0f} MB; planned and proved in {1e3 * row['planned_s']:.0f} ms"
    )


def report(results: dict[str, Any]) -> None:
    print("'of its limit': wall seconds over those of the same bytes, shared-memory copy for shm")
    print(
        "and TCP loopback for p2p; 'extra': rise of resident memory of the worst rank, first call"
    )
    for row in results["cases"]:
        print(f"\n{title(row)}")
        print_table(HEADERS, [cells(name, arm) for name, arm in row["arms"].items()])
    show(results["goals"])
