"""What a rank does in the measurement of transfers: equality first, then rounds in turn.

Called by `benchmarks.reshard_transfer` through `LocalWorkers`, on every rank.
"""

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import cpu_seconds, rise_of
from benchmarks.reshard_arms import (
    DTYPE,
    Here,
    Maker,
    Work,
    allocate,
    cut,
    limit_arms,
    our_arms,
    relay_arm,
    torch_arms,
)
from shardloop.families import canonical_model
from shardloop.layout import Layout, make_layout
from shardloop.parallel.context import RankContext
from shardloop.reshard.plan import Plan, plan_reshard
from shardloop.reshard.verify import verify
from shardloop.transport.relay import plan_relay

Moments = dict[str, list[tuple[float, float, float]]]
"""By arm: begin, end and CPU seconds on this rank, a tuple for each round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """From `src` on the first ranks into `dst` on the next, or on the same."""

    src: str
    dst: str
    same_ranks: bool = False
    num_replicas: int = 1
    """More than one: `dst` is one replica's layout, and the arms are a chain and direct sends."""

    def __str__(self) -> str:
        if self.num_replicas > 1:
            return f"{self.src} -> {self.num_replicas} replicas of {self.dst}"
        return f"{self.src} -> {self.dst}{', same ranks' if self.same_ranks else ''}"

    @property
    def whole_dst(self) -> str:
        """The layout of all replicas together."""
        scheme, _, axes = self.dst.partition(":")
        return (
            f"{scheme}:replicas={self.num_replicas},{axes}" if self.num_replicas > 1 else self.dst
        )

    def plan(self, config: Mapping[str, Any]) -> Plan:
        model = canonical_model(config)
        src, dst = make_layout(model, self.src), make_layout(model, self.whole_dst)
        first = 0 if self.same_ranks else src.world_size
        ranks = range(first, first + dst.world_size)
        return plan_reshard(src, dst, src_ranks=range(src.world_size), dst_ranks=ranks)


def compare_arms(
    context: RankContext, case: Case, config: dict[str, Any], rounds: int, folder: Path
) -> dict[str, Any]:
    """Collective over all ranks: what each arm writes must be equal to the bit; then its times."""
    warnings.filterwarnings("ignore")  # DCP's, of each folder that it overwrites
    logging.getLogger("torch").setLevel(logging.ERROR)  # redistribute's, of gloo's missing alltoall
    with ExitStack() as closing:
        began = time.perf_counter()
        proof = verify(case.plan(config))
        planned_s = time.perf_counter() - began
        plan, rank = proof.plan, context.rank
        state = _random_state(plan.src)
        here = Here(
            context=context,
            proof=proof,
            src=cut(plan.src, rank, state) if rank in plan.src_ranks else None,
            dst=allocate(plan.dst, plan.dst_index[rank]) if rank in plan.dst_ranks else None,
            folder=folder,
            closing=closing,
        )
        wanted = cut(plan.dst, plan.dst_index[rank], state) if here.dst is not None else {}
        del state
        found, works = {}, {}
        for name, make in _arms(case, here, config).items():
            is_limit = name.startswith("limit")
            found[name], works[name] = _checked(here, name, make, {} if is_limit else wanted)
        del wanted
        moments = alternate(works, rounds)
    return {
        name: asdict(result) | {"planned_s": planned_s, "moments": moments[name]}
        for name, result in found.items()
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Of an arm's first call on this rank."""

    prepared_s: float
    rise: int
    """Of resident memory, over preparing and the first call."""
    bytes_sent: int | None
    staged: int | None


def _arms(case: Case, here: Here, config: Mapping[str, Any]) -> dict[str, Maker]:
    if case.num_replicas > 1:
        return _replica_arms(case, here, config)
    arms = our_arms(here)
    if all(part.startswith("fsdp") for part in case.src.split(",")):
        arms |= torch_arms(here)
    return arms | limit_arms(here)


def _replica_arms(case: Case, here: Here, config: Mapping[str, Any]) -> dict[str, Maker]:
    plan = here.proof.plan
    replica = make_layout(canonical_model(config), case.dst)
    size = replica.world_size
    ranks = [plan.dst_ranks[i : i + size] for i in range(0, len(plan.dst_ranks), size)]
    relay = plan_relay(plan.src, replica, src_ranks=plan.src_ranks, replica_ranks=ranks)
    direct = our_arms(here)
    del direct["ours, gather"]
    return {"ours, relay": lambda: relay_arm(here, relay)} | direct | limit_arms(here)


def _random_state(layout: Layout) -> dict[str, torch.Tensor]:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.empty(shape, dtype=DTYPE).normal_(generator=generator)
        for name, shape in layout.model.tensor_shapes().items()
    }


def _checked(
    here: Here, name: str, make: Maker, wanted: Mapping[str, torch.Tensor]
) -> tuple[Found, Work]:
    for tensor in (here.dst or {}).values():
        tensor.fill_(torch.nan)
    dist.barrier()
    prepare_rise, (prepared_s, work) = rise_of(lambda: _timed(make))
    dist.barrier()
    call_rise, report = rise_of(work)
    dist.barrier()
    for local_name, tensor in wanted.items():
        assert here.dst is not None
        if not torch.equal(here.dst[local_name].view(torch.int16), tensor.view(torch.int16)):
            raise AssertionError(f"{name} wrote {local_name} wrongly on rank {here.context.rank}")
    return Found(
        prepared_s=prepared_s,
        rise=max(0, prepare_rise) + max(0, call_rise),
        bytes_sent=None if report is None else report.bytes_sent,
        staged=None if report is None else report.peak_extra_bytes,
    ), work


def _timed(make: Maker) -> tuple[float, Work]:
    began = time.perf_counter()
    work = make()
    return time.perf_counter() - began, work


def alternate(
    arms: Mapping[str, Callable[[], object]], rounds: int, *, rotate: bool = True
) -> Moments:
    """Collective over all ranks: call the arms in turn, each when all ranks have come.

    As `measure.interleaved`; all processes of a machine read one clock, so that the caller can take
    the time from the first to begin to the last to end.
    """
    names = list(arms)
    moments: Moments = {name: [] for name in names}
    for turn in range(-1, rounds):
        for place in range(len(names)):
            name = names[(turn * rotate + place) % len(names)]
            dist.barrier()
            cpu_s, began = cpu_seconds(), time.perf_counter()
            arms[name]()
            ended = time.perf_counter()
            if turn >= 0:
                moments[name].append((began, ended, cpu_seconds() - cpu_s))
    return moments
