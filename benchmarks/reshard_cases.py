"""What planning is measured on: models and pairs of layouts, each planned in a process of its own.

Called by `benchmarks.reshard_planning`. Loads no torch, so that a process is quick to start, and
nothing that an earlier case left in a cache helps a later one.
"""

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from benchmarks.reshard_bound import least_busiest
from shardloop.families import canonical_model
from shardloop.families.public import public_model
from shardloop.layout import make_layout
from shardloop.reshard.cost import Cost, cost
from shardloop.reshard.plan import Plan, plan_reshard
from shardloop.reshard.verify import verify

NUM_RANKS = 9
"""Whose lists are made, of each side: spread evenly over its ranks."""
ITEMSIZE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    model: str
    src: str
    dst: str
    same_ranks: bool = False
    changes: tuple[tuple[str, int], ...] = ()
    """Fields of the model's config that are not the public ones."""

    def __str__(self) -> str:
        same = ", same ranks" if self.same_ranks else ""
        return f"{self.model} {self.src} -> {self.dst}{same}"

    @property
    def config(self) -> dict[str, Any]:
        return public_model(self.model) | dict(self.changes)


FSDP64, ENGINE8 = "fsdp=64", "engine:tp=8"
MEGATRON64, ENGINES8 = "megatron:pp=4,dp=8,tp=2", "engine:replicas=8,tp=8"
INTERLEAVED64 = "megatron:pp=4,vpp=2,dp=8,tp=2"
MEGATRON2048, ENGINES2048 = "megatron:pp=16,dp=2,ep=64", "engine:replicas=32,ep=64,tp=8"
FOLDED2048 = "megatron:pp=16,dp=2,tp=8,ep=64,etp=1"

SMOKE = [
    Case(model="Llama-3-70B", src="fsdp=4", dst="engine:tp=2"),
    Case(model="DeepSeek-V3", src="megatron:pp=2,dp=2,ep=4", dst="engine:tp=2"),
]
QUICK = [
    Case(model="Llama-3-70B", src=FSDP64, dst=ENGINE8),
    Case(model="Llama-3-70B", src=MEGATRON64, dst=ENGINES8),
    Case(model="Llama-3-70B", src=INTERLEAVED64, dst=ENGINES8),
    Case(model="Qwen3-235B-A22B", src=FSDP64, dst=ENGINE8),
    Case(model="Qwen3-235B-A22B", src=MEGATRON2048, dst=ENGINES2048),
    Case(model="DeepSeek-V3", src=MEGATRON2048, dst=ENGINES2048),
    Case(model="DeepSeek-V3", src=MEGATRON2048, dst=ENGINES2048, same_ranks=True),
    Case(model="DeepSeek-V3", src=FOLDED2048, dst=ENGINES2048),
    Case(model="DeepSeek-V3", src="fsdp=2048", dst=ENGINES2048),
    Case(model="DeepSeek-V3", src="zero3=2048", dst=ENGINES2048),
    Case(model="DeepSeek-V3", src="zero3=256,tp=8", dst=ENGINES2048),
    Case(model="Kimi-K2", src=MEGATRON2048, dst=ENGINES2048),
]
FULL = [
    *QUICK,
    Case(model="Qwen3-235B-A22B", src=MEGATRON64, dst=ENGINES8),
    Case(model="DeepSeek-V3", src=FSDP64, dst=ENGINE8),
    Case(model="DeepSeek-V3", src="fsdp=256,tp=8,ep=64", dst=ENGINES2048),
    Case(model="Kimi-K2", src=MEGATRON2048, dst=ENGINES2048, same_ranks=True),
    Case(model="Kimi-K2", src="fsdp=2048", dst=ENGINES2048),
    Case(model="Kimi-K2", src="zero3=2048", dst=ENGINES2048),
]

GROWTH_SRC, GROWTH_DST = MEGATRON2048, "engine:replicas=1,ep=64,tp=8"


def growth_in_tensors(sizes: Sequence[tuple[int, int]]) -> list[Case]:
    """DeepSeek-V3 with other numbers of (layers, experts)."""
    return [
        Case(
            model="DeepSeek-V3",
            src=GROWTH_SRC,
            dst=GROWTH_DST,
            changes=(("num_hidden_layers", layers), ("n_routed_experts", experts)),
        )
        for layers, experts in sizes
    ]


def growth_in_ranks(replicas: Sequence[int]) -> list[Case]:
    """DeepSeek-V3 to so many replicas of 64 ranks."""
    return [
        Case(model="DeepSeek-V3", src=GROWTH_SRC, dst=f"engine:replicas={n},ep=64,tp=8")
        for n in replicas
    ]


def growth_in_width(widths: Sequence[int]) -> list[Case]:
    return [Case(model="DeepSeek-V3", src=f"fsdp={n}", dst=GROWTH_DST) for n in widths]


def in_fresh_process(work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)`, with nothing in any cache. It ends with this process, however that ends."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)


def planned(case: Case) -> tuple[Plan, dict[str, float]]:
    """A case's plan, proved, and the milliseconds of each part of the way."""
    model = canonical_model(case.config)
    began = time.perf_counter()
    src, dst = make_layout(model, case.src), make_layout(model, case.dst)
    built = time.perf_counter()
    ranks = _same_ranks(src.world_size, dst.world_size) if case.same_ranks else {}
    plan = plan_reshard(src, dst, **ranks)
    made = time.perf_counter()
    verify(plan)
    proved = time.perf_counter()
    moments = {"build": built - began, "plan": made - built, "verify": proved - made}
    return plan, {name: 1e3 * value for name, value in moments.items()}


def _same_ranks(num_src: int, num_dst: int) -> dict[str, Any]:
    return {"src_ranks": range(num_src), "dst_ranks": range(num_dst)}


def times_of(case: Case) -> dict[str, Any]:
    """What one process takes to plan and prove, and a rank to make its lists."""
    plan, times_ms = planned(case)
    proof = verify(plan)
    lists = {
        "receive": _list_ms(plan.dst_ranks, lambda rank: list(plan.runs_to(rank))),
        "send": _list_ms(plan.src_ranks, lambda rank: list(plan.runs_from(rank))),
    }
    return {
        "ms": times_ms,
        "list_ms": {side: max(times) for side, times in lists.items()},
        "records": proof.num_boxes,
        "num_tensors": sum(
            (c.layers[1] - c.layers[0]) * (c.experts[1] - c.experts[0])
            for c in plan.src.model.classes
        ),
        "num_src_ranks": len(plan.src_ranks),
        "num_dst_ranks": len(plan.dst_ranks),
        "replan": _replan(plan, times_ms["plan"]),
    }


def _list_ms(ranks: Sequence[int], work: Callable[[int], object]) -> list[float]:
    """Of some ranks, first and last among them; the first finds nothing in any cache."""
    step = max(1, (len(ranks) - 1) // (NUM_RANKS - 1))
    times = []
    for rank in dict.fromkeys([*ranks[::step], ranks[-1]]):
        began = time.perf_counter()
        work(rank)
        times.append(1e3 * (time.perf_counter() - began))
    return times


def _replan(plan: Plan, first_ms: float) -> dict[str, float] | None:
    """A plan without one source rank, in the process that made the first one; None where that
    rank alone holds something, or is a destination too."""
    if plan.shares_ranks or not all(tensor.free_axes for tensor in plan.src.tensors):
        return None
    began = time.perf_counter()
    again = plan_reshard(
        plan.src,
        plan.dst,
        src_ranks=plan.src_ranks,
        dst_ranks=plan.dst_ranks,
        lost=plan.src_ranks[-1:],
    )
    plan_ms = 1e3 * (time.perf_counter() - began)
    verify(again)
    return {"plan_ms": plan_ms, "to_first": plan_ms / first_ms}


def peak_bytes(case: Case) -> int:
    """Python's and numpy's peak over building, planning and proving."""
    tracemalloc.start()
    planned(case)
    return tracemalloc.get_traced_memory()[1]


def moved(case: Case) -> dict[str, Any]:
    """What the plan moves, and how evenly: counted over all pairs of ranks."""
    plan, _ = planned(case)
    counted: Cost = cost(plan, itemsize=ITEMSIZE)
    busiest = max(counted.send_bytes.values())
    bound = least_busiest(plan, itemsize=ITEMSIZE)
    return {
        "wire_bytes": counted.wire_bytes,
        "to_minimum": counted.wire_bytes / max(1, counted.minimum_bytes),
        "send_imbalance": counted.send_imbalance,
        "receive_imbalance": counted.receive_imbalance,
        "busiest_to_bound": busiest / bound if bound else 1.0,
        "num_transfers": counted.num_transfers,
    }
