"""How little the busiest sender of a plan could send, whatever the plan. Called by reshard_cases.

Let S be any set of source ranks. What only ranks of S hold, and what a destination does not hold
itself, must be sent by S, so one of S sends the |S|-th part of it at least. The greatest such share
over all S is the least possible load (the minimum cut of the flow of bytes from holders to
consumers, bytes being divisible). Any family of sets gives a true lower bound; tried are

    each set of ranks that hold the same elements (the replicas of a shard)
    unions of those that overlap, until none do  (a pipeline stage, where experts are cut apart)
    all ranks

Where the sets of holders are nested or disjoint this is exact: what a union of disjoint sets must
send lies between the shares of its parts. Where they cross, the bound may be lower than the least
load, never higher, so that a plan that reaches it is perfectly even.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from shardloop.families.base import ITEMSIZE as ITEMSIZES
from shardloop.layout.strips import Ints
from shardloop.reshard.flow import Flow
from shardloop.reshard.join import Join
from shardloop.reshard.loads import loads
from shardloop.reshard.plan import Plan


def least_busiest(plan: Plan, *, itemsize: int) -> float:
    """A lower bound of the bytes that the busiest source rank sends, in any plan."""
    bytes_of: Counter[int] = Counter()
    for flow in plan.flows:
        bytes_of.update(_must_send(plan, flow, itemsize))
    everyone = sum(bytes_of.values())
    shares = [everyone / len(plan.src_ranks)]
    for one in {*bytes_of, *_unions(bytes_of)}:
        inside = sum(size for held_by, size in bytes_of.items() if held_by & ~one == 0)
        shares.append(inside / one.bit_count())
    return max(shares)


def _must_send(plan: Plan, flow: Flow, itemsize: int) -> Counter[int]:
    """Bytes by the set of ranks that hold them, as a bit mask.

    No plan sends other bytes from such a set: the wire carries what destinations lack, once, and no
    rank outside holds it. So the sums over its ranks are the same in all plans.
    """
    dtype = flow.tensor_class.dtype
    size = itemsize if dtype is None else ITEMSIZES[dtype]
    num_ranks = plan.src.world_size
    sent = np.zeros(num_ranks, dtype=np.int64)
    for load in loads(plan, flow):
        dst = load.dst[:, None] + load.free
        num_sent = (plan.twin[load.src][:, None] != dst).sum(axis=1)
        np.add.at(sent, load.src, size * load.num_elements * num_sent)
    label = _holder_sets(flow, np.arange(num_ranks))
    order = np.argsort(label, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(label[order])) + 1)
    found: Counter[int] = Counter()
    for ranks in groups:
        if num_bytes := int(sent[ranks].sum()):
            found[_mask(ranks)] += num_bytes
    return found


def _holder_sets(flow: Flow, ranks: Ints) -> Ints:
    """A label for each rank: equal for ranks that hold some element of the flow together."""
    columns = [
        _together(step, part)
        for step, part in zip(flow.joins, flow.holders.parts(ranks), strict=True)
    ]
    _, label = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
    return label.reshape(-1)


def _together(step: Join, part: Ints) -> Ints:
    """The least part that holds an atom with each part, directly or through others."""
    holders = step.holders
    least = {one: one for one in holders.part.tolist()}
    shared = np.flatnonzero(holders.count > 1).tolist()
    changed = bool(shared)
    while changed:
        changed = False
        for atom in shared:
            members = holders.part[holders.start[atom] : holders.start[atom + 1]].tolist()
            lowest = min(least[one] for one in members)
            for one in members:
                if least[one] != lowest:
                    least[one], changed = lowest, True
    return np.array([least.get(one, one) for one in part.tolist()])


def _unions(masks: Iterable[int]) -> set[int]:
    """Overlapping sets joined until all are disjoint."""
    disjoint: list[int] = []
    for mask in masks:
        apart = []
        for other in disjoint:
            if other & mask:
                mask |= other
            else:
                apart.append(other)
        disjoint = [*apart, mask]
    return set(disjoint)


def _mask(ranks: Ints) -> int:
    bits = 0
    for rank in ranks.tolist():
        bits |= 1 << rank
    return bits
