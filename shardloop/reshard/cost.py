"""What a plan moves: bytes per pair of ranks, the least possible, and how evenly. Floor 1.

Called by `controller.setup`, which prints it, and by `shardloop.weight_sync`; moves nothing.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from shardloop.families.base import ITEMSIZE
from shardloop.layout.strips import Ints, expand
from shardloop.reshard.flow import Flow
from shardloop.reshard.join import Join
from shardloop.reshard.loads import loads
from shardloop.reshard.plan import Plan

MOST_PAIRS = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Cost:
    """Bytes that a plan moves. Copies within a rank are not on the wire."""

    src_ranks: tuple[int, ...]
    dst_ranks: tuple[int, ...]
    matrix: Ints
    """[source ranks, destination ranks]: bytes on the wire, in the order of these."""
    local_bytes: int
    """Copied from a rank to itself."""
    minimum_bytes: int
    """What the destinations need less what their ranks hold already; no plan moves less."""
    num_transfers: int
    """Boxes moved, copies included."""

    @cached_property
    def wire_bytes(self) -> int:
        return int(self.matrix.sum())

    @cached_property
    def pair_bytes(self) -> Mapping[tuple[int, int], int]:
        """(source rank, destination rank) -> bytes on the wire, where there are any."""
        src, dst = np.nonzero(self.matrix)
        pairs = zip(src.tolist(), dst.tolist(), self.matrix[src, dst].tolist(), strict=True)
        return {(self.src_ranks[s], self.dst_ranks[d]): size for s, d, size in pairs}

    @cached_property
    def send_bytes(self) -> Mapping[int, int]:
        """On the wire, for every source rank."""
        return dict(zip(self.src_ranks, self.matrix.sum(axis=1).tolist(), strict=True))

    @cached_property
    def receive_bytes(self) -> Mapping[int, int]:
        return dict(zip(self.dst_ranks, self.matrix.sum(axis=0).tolist(), strict=True))

    @property
    def send_imbalance(self) -> float:
        """Busiest sender over the mean of all source ranks; 1 is even."""
        return _imbalance(self.matrix.sum(axis=1))

    @property
    def receive_imbalance(self) -> float:
        return _imbalance(self.matrix.sum(axis=0))

    def __str__(self) -> str:
        rows = [
            ("on the wire", bytes_text(self.wire_bytes)),
            ("least possible", bytes_text(self.minimum_bytes)),
            ("copied in place", bytes_text(self.local_bytes)),
            ("transfers", f"{self.num_transfers:,}"),
            ("busiest sender", f"{self.send_imbalance:.2f} of the mean"),
            ("busiest receiver", f"{self.receive_imbalance:.2f} of the mean"),
        ]
        lines = [f"{title:22}{value:>18}" for title, value in [*rows, *self._largest_pairs()]]
        if (others := np.count_nonzero(self.matrix) - MOST_PAIRS) > 0:
            lines.append(f"and {others:,} more pairs of ranks, none with more bytes")
        return "\n".join(lines)

    def _largest_pairs(self) -> list[tuple[str, str]]:
        flat = self.matrix.reshape(-1)
        largest = np.argsort(-flat, kind="stable")[:MOST_PAIRS]
        pairs = sorted((*divmod(at, len(self.dst_ranks)), flat[at]) for at in largest.tolist())
        return [
            (f"rank {self.src_ranks[s]} -> {self.dst_ranks[d]}", bytes_text(size))
            for s, d, size in pairs
            if size
        ]


def cost(plan: Plan, *, itemsize: int) -> Cost:
    """Count what the plan moves.

    Args:
        itemsize: bytes on the wire per element of the tensors kept in the model's own dtype.
    """
    shape = len(plan.src_ranks), len(plan.dst_ranks)
    totals: dict[bytes, Ints] = defaultdict(lambda: np.zeros(prod(shape), dtype=np.int64))
    num_transfers = minimum_bytes = 0
    for flow in plan.flows:
        dtype = flow.tensor_class.dtype
        size = itemsize if dtype is None else ITEMSIZE[dtype]
        minimum_bytes += size * _missing(plan, flow)
        for load in loads(plan, flow):
            pair = load.src * shape[1] + load.dst
            np.add.at(totals[load.free.tobytes()], pair, size * load.num_elements)
            num_transfers += load.num_transfers
    copied = np.flatnonzero(plan.twin >= 0)
    matrix = _all_free(totals, shape)
    local_bytes = int(matrix[copied, plan.twin[copied]].sum())
    matrix[copied, plan.twin[copied]] = 0
    return Cost(
        src_ranks=plan.src_ranks,
        dst_ranks=plan.dst_ranks,
        matrix=matrix,
        local_bytes=local_bytes,
        minimum_bytes=minimum_bytes,
        num_transfers=num_transfers,
    )


def _all_free(totals: Mapping[bytes, Ints], shape: tuple[int, int]) -> Ints:
    """The matrix of what moves to destinations and, by some offsets from them, to free ranks."""
    flat = np.zeros(prod(shape), dtype=np.int64)
    for free, total in totals.items():
        pairs = np.flatnonzero(total)
        for offset in np.frombuffer(free, dtype=np.int64):
            flat[pairs + offset] += total[pairs]
    return flat.reshape(shape)


def _missing(plan: Plan, flow: Flow) -> int:
    """Elements of a flow that its destinations need and do not hold: a product over blocks."""
    src = np.flatnonzero(plan.twin >= 0)
    dst = plan.twin[src]
    needed, kept = len(flow.consumers.free), np.ones(len(src), dtype=np.int64)
    sides = zip(flow.joins, flow.holders.parts(src), flow.consumers.parts(dst), strict=True)
    for step, src_part, dst_part in sides:
        needed *= int(np.prod(step.dst.hi - step.dst.lo, axis=1).sum())
        kept *= _common(step, src_part, dst_part)
    return needed - int(kept.sum())


def _common(step: Join, src_part: Ints, dst_part: Ints) -> Ints:
    """Elements of a block that both of two parts have."""
    pair, place = expand(step.holder_start[step.atom], step.holder_start[step.atom + 1])
    width = int(max(step.dst.part.max(initial=0), dst_part.max(initial=0))) + 1
    key = step.holders.part[place] * width + step.dst.part[step.row[pair]]
    sizes = np.prod(step.hi - step.lo, axis=1)[pair]
    keys, index = np.unique(key, return_inverse=True)
    sums = np.append(np.bincount(index, weights=sizes), 0).astype(np.int64)
    wanted = src_part * width + dst_part
    at = np.searchsorted(keys, wanted)
    return np.where(np.append(keys, -1)[at] == wanted, sums[at], 0)


def _imbalance(sizes: Ints) -> float:
    total = int(sizes.sum())
    return int(sizes.max()) * len(sizes) / total if total else 1.0


def bytes_text(num_bytes: float) -> str:
    """In three digits: `999 kB`, `1 MB`, `12.3 GB`; of the largest unit all digits."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
