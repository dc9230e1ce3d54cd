"""What is asked for, and the plan made from it. Floor 5.

    options ──asked─────────────▶ Request ──make──▶ Planned (plan, proof, cost, seconds)
    a file  ──request_from_json─▶

A `Request` holds everything that decides the plan, so it can be made again elsewhere.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from shardloop.errors import UsageError
from shardloop.families import CanonicalModel, canonical_model
from shardloop.families.fp8 import with_block_fp8
from shardloop.families.lora import MOST_RANK, lora_adapter
from shardloop.layout import Layout, make_layout
from shardloop.reshard.cost import Cost, cost
from shardloop.reshard.plan import Plan, plan_reshard
from shardloop.reshard.verify import Proof, verify

ITEMSIZE: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
GB_PER_S = 50.0
"""Of one 400 Gbit/s network card for each rank."""
SPEEDS = (1e-3, 1e6)
"""GB/s that a network may have."""
MOST_PAIRS = 2**28
"""Of a rank of each side: the cost counts the bytes of every pair."""
MOST_LISTED = 8
"""Ranks that a message lists."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Request:
    """All that decides a plan, and what is told of it.

    Raises:
        UsageError: parts that are out of range or exclude each other; all are named.
    """

    model: str
    config: Mapping[str, Any]
    """Of the model; its name is only for the reader."""
    src: str
    dst: str
    dtype: str
    colocate: bool
    src_ranks: tuple[int, ...] | None
    """None: the first ranks."""
    dst_ranks: tuple[int, ...] | None
    """None: the ranks after as many as the source has, or the first ones if colocated."""
    lost: tuple[int, ...]
    lora: int | None
    fp8: bool
    gb_per_s: float
    """Speed of a rank's network in each direction, in 1e9 bytes a second."""
    rank: int | None
    """Whose transfers are listed in full."""

    def __post_init__(self) -> None:
        faults = []
        if self.colocate and (self.src_ranks is not None or self.dst_ranks is not None):
            faults.append("--colocate gives both layouts their ranks; leave out the lists of ranks")
        if not SPEEDS[0] <= self.gb_per_s <= SPEEDS[1]:
            allowed = "choose a speed from {:g} to {:g}".format(*SPEEDS)
            faults.append(f"gb-per-s={self.gb_per_s}; {allowed}")
        if self.lora is not None and not 1 <= self.lora <= MOST_RANK:
            faults.append(f"lora={self.lora}; choose a rank from 1 to {MOST_RANK}")
        if self.lora is not None and self.fp8:
            faults.append("--lora plans the factors alone, which are not in FP8; leave out --fp8")
        if faults:
            raise UsageError("\n".join(faults))

    def ranks(self, src: Layout, dst: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of both sides.

        Raises:
            UsageError: a list does not have as many different ranks as its layout, or a lost rank
                is none of the source or one of the destination; all are named.
        """
        num_src, num_dst = src.world_size, dst.world_size
        first = 0 if self.colocate else num_src
        of_src = tuple(range(num_src)) if self.src_ranks is None else self.src_ranks
        default = tuple(range(first, first + num_dst))
        of_dst = default if self.dst_ranks is None else self.dst_ranks
        faults = [*_rank_faults("src", of_src, src), *_rank_faults("dst", of_dst, dst)]
        if unknown := sorted({*self.lost} - {*of_src}):
            faults.append(
                f"lost: {_few(unknown)} not among the {len(of_src)} ranks of the source "
                f"({_few(of_src)}); only they can be lost"
            )
        if kept := sorted({*self.lost} & {*of_dst}):
            faults.append(
                f"lost: {_few(kept)} among the ranks of the destination; give it other ranks"
            )
        if faults:
            raise UsageError("\n".join(faults))
        return of_src, of_dst


def _rank_faults(side: str, ranks: tuple[int, ...], layout: Layout) -> Iterator[str]:
    if len(ranks) != layout.world_size:
        yield (
            f"{side}-ranks lists {len(ranks)} ranks ({_few(ranks)}), layout {layout.spec} has "
            f"{layout.world_size}; list as many"
        )
    odd = [rank for rank, count in Counter(ranks).items() if count > 1 or rank < 0]
    if odd:
        yield f"{side}-ranks: {_few(odd)} occur twice or are below 0; list different ranks"


def _few(ranks: Sequence[int]) -> str:
    more = [f"and {len(ranks) - MOST_LISTED} more"] if len(ranks) > MOST_LISTED else []
    return ", ".join([*map(str, ranks[:MOST_LISTED]), *more])


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A proved plan with its cost, and the seconds of each step."""

    request: Request
    plan: Plan
    proof: Proof
    cost: Cost
    seconds: Mapping[str, float]

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.request.dtype]


def make(request: Request) -> Planned:
    """Plan, prove and count.

    Raises:
        UsageError: as `Request.ranks`, or there are too many pairs of ranks. ModelError,
            LayoutError, PlanError: what was asked for cannot be.
    """
    seconds: dict[str, float] = {}
    src, dst = _timed(seconds, "layouts", lambda: _layouts(request))
    if src.world_size * dst.world_size > MOST_PAIRS:
        raise UsageError(
            f"layouts {src.spec} and {dst.spec} have {src.world_size:,} x {dst.world_size:,} pairs "
            f"of ranks, whose bytes are counted one by one; choose at most {MOST_PAIRS:,}"
        )
    src_ranks, dst_ranks = request.ranks(src, dst)
    ranks = {"src_ranks": src_ranks, "dst_ranks": dst_ranks, "lost": request.lost}
    plan = _timed(seconds, "plan", lambda: plan_reshard(src, dst, **ranks))
    proof = _timed(seconds, "proof", lambda: verify(plan))
    counted = _timed(seconds, "cost", lambda: cost(plan, itemsize=ITEMSIZE[request.dtype]))
    return Planned(request=request, plan=plan, proof=proof, cost=counted, seconds=seconds)


def _timed(seconds: dict[str, float], name: str, call: Callable[[], T]) -> T:
    start = time.perf_counter()
    result = call()
    seconds[name] = time.perf_counter() - start
    return result


def _layouts(request: Request) -> tuple[Layout, Layout]:
    model = request_model(request)
    return make_layout(model, request.src), make_layout(model, request.dst)


def request_model(request: Request) -> CanonicalModel:
    """The tensors that are planned for."""
    model = canonical_model(request.config)
    if request.fp8:
        model = with_block_fp8(model)
    if request.lora is not None:
        modules = {c.key.split(".")[-2] for c in model.classes if c.is_linear}
        model = lora_adapter(model, rank=request.lora, targets=sorted(modules))
    return model
