"""What a plan moves: bytes per pair of ranks, the least possible, and how evenly. Floor 1.

Called by `controller.setup`, which prints it, and by `shardloop.weight_sync`; moves nothing.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from shardloop.reshard.flow import Flow
from shardloop.reshard.plan import Plan
from shardloop.reshard.turns import runs_to


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes that a plan moves. Copies within a rank are not on the wire."""

    pair_bytes: Mapping[tuple[int, int], int]
    """(source rank, destination rank) -> bytes on the wire."""
    wire_bytes: int
    local_bytes: int
    """Copied from a rank to itself."""
    minimum_bytes: int
    """What the destinations need less what their ranks hold already; no plan moves less."""
    num_transfers: int
    """Boxes moved, copies included."""
    send_bytes: Mapping[int, int]
    """On the wire, for every source rank."""
    receive_bytes: Mapping[int, int]

    @property
    def send_imbalance(self) -> float:
        """Busiest sender over the mean of all source ranks; 1 is even."""
        return _imbalance(self.send_bytes)

    @property
    def receive_imbalance(self) -> float:
        return _imbalance(self.receive_bytes)

    def __str__(self) -> str:
        rows = [
            ("on the wire", _bytes_text(self.wire_bytes)),
            ("least possible", _bytes_text(self.minimum_bytes)),
            ("copied in place", _bytes_text(self.local_bytes)),
            ("transfers", f"{self.num_transfers:,}"),
            ("busiest sender", f"{self.send_imbalance:.2f} x mean"),
            ("busiest receiver", f"{self.receive_imbalance:.2f} x mean"),
        ]
        lines = [f"{title:18}{value:>14}" for title, value in rows]
        lines += [
            f"{f'rank {src} -> {dst}':18}{_bytes_text(num_bytes):>14}"
            for (src, dst), num_bytes in sorted(self.pair_bytes.items())
        ]
        return "\n".join(lines)


def cost(plan: Plan, *, itemsize: int) -> Cost:
    """Count what the plan moves, `itemsize` bytes per element on the wire."""
    pairs: Counter[tuple[int, int]] = Counter()
    num_transfers = 0
    for dst in range(plan.dst.world_size):
        for run in runs_to(plan, dst):
            pair = plan.src_ranks[run.src], plan.dst_ranks[run.dst]
            pairs[pair] += run.volume() * itemsize
            num_transfers += len(run.layers)
    wire = {pair: num_bytes for pair, num_bytes in sorted(pairs.items()) if pair[0] != pair[1]}
    sent, received = dict.fromkeys(plan.src_ranks, 0), dict.fromkeys(plan.dst_ranks, 0)
    for (src_rank, dst_rank), num_bytes in wire.items():
        sent[src_rank] += num_bytes
        received[dst_rank] += num_bytes
    return Cost(
        pair_bytes=wire,
        wire_bytes=sum(wire.values()),
        local_bytes=sum(pairs.values()) - sum(wire.values()),
        minimum_bytes=_minimum_elements(plan) * itemsize,
        num_transfers=num_transfers,
        send_bytes=sent,
        receive_bytes=received,
    )


def _minimum_elements(plan: Plan) -> int:
    """Elements needed and not held by the same rank, from the layouts' tables alone."""
    held = {rank: src for src, rank in enumerate(plan.src_ranks)}
    missing = 0
    for dst, rank in enumerate(plan.dst_ranks):
        for flow in plan.flows:
            missing += prod(_needed(flow, dim, dst) for dim in range(len(flow.joins)))
            if rank in held:
                missing -= prod(_kept(flow, dim, held[rank], dst) for dim in range(len(flow.joins)))
    return missing


def _needed(flow: Flow, dim: int, dst: int) -> int:
    table = flow.joins[dim].dst
    mine = table.part == flow.dst.cuts[dim].part(dst)
    return int((table.hi - table.lo)[mine].sum())


def _kept(flow: Flow, dim: int, src: int, dst: int) -> int:
    """Elements along one dim that the rank holds on both sides."""
    here, there = flow.joins[dim].src, flow.joins[dim].dst
    a = here.part == flow.src.cuts[dim].part(src)
    b = there.part == flow.dst.cuts[dim].part(dst)
    lo = np.maximum.outer(here.lo[a], there.lo[b])
    hi = np.minimum.outer(here.hi[a], there.hi[b])
    return int(np.maximum(hi - lo, 0).sum())


def _imbalance(bytes_of: Mapping[int, int]) -> float:
    total = sum(bytes_of.values())
    return max(bytes_of.values()) * len(bytes_of) / total if total else 1.0


def _bytes_text(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
