"""A chain through replicas: each hands what it receives on to the next. Floor 3.

    sources ──▶ replica 0 ──▶ replica 1 ──▶ replica 2      each link carries one replica's bytes

The sources send to the first replica alone; a rank passes every bucket on, as it came, to the rank
of equal place in the next replica while it receives the following one. Carried out by
`transport.p2p`.

Why it is right: each replica has a plan of its own, from the sources to it, and each is proved.
What makes the chain equal to these plans is that ranks of equal place receive the same stream: the
same boxes from the same sources in the same order into the same views. `Relay` compares just that,
so the bytes that a rank gets from its equal are those that its own proved plan would have brought.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardloop.errors import PlanError
from shardloop.layout.layout import Layout
from shardloop.reshard.plan import Plan, plan_reshard
from shardloop.reshard.verify import Proof, verify


@dataclass(frozen=True, slots=True)
class Hop:
    """One rank's place in a chain: none where both ends are None."""

    rank: int
    before: int | None = None
    """The rank it receives from instead of the sources."""
    after: int | None = None
    """The rank it passes on to."""


@dataclass(frozen=True, kw_only=True)
class Relay:
    """The proofs of all replicas, in the order of the chain. Made by `plan_relay`."""

    proofs: tuple[Proof, ...]

    def __post_init__(self) -> None:
        """Raises PlanError: replicas share ranks with each other or the sources, or equal places
        would receive different streams."""
        plans = [proof.plan for proof in self.proofs]
        _check_apart(plans)
        for place, rank in enumerate(plans[0].dst_ranks):
            wanted = _stream(plans[0], rank)
            for number, plan in enumerate(plans):
                if _stream(plan, plan.dst_ranks[place]) != wanted:
                    raise PlanError(
                        f"rank {plan.dst_ranks[place]} of replica {number} needs another stream "
                        f"than rank {rank} of replica 0, so nothing can be passed on between them; "
                        "give all replicas one layout and one source"
                    )

    def proof_of(self, rank: int) -> Proof:
        """The plan that says what `rank` does: its replica's; for a source the first one's."""
        own = (proof for proof in self.proofs if rank in proof.plan.dst_ranks)
        return next(own, self.proofs[0])

    def hop(self, rank: int) -> Hop:
        replicas = [proof.plan.dst_ranks for proof in self.proofs]
        for number, ranks in enumerate(replicas):
            if rank in ranks:
                place = ranks.index(rank)
                before = replicas[number - 1][place] if number else None
                last = number + 1 == len(replicas)
                return Hop(rank, before, None if last else replicas[number + 1][place])
        return Hop(rank)


def plan_relay(
    src: Layout,
    replica: Layout,
    *,
    src_ranks: Sequence[int],
    replica_ranks: Sequence[Sequence[int]],
) -> Relay:
    """Plan and prove a chain from `src` through replicas that all have the layout `replica`.

    Args:
        replica_ranks: the global ranks of each replica, in the order of the chain.
    Raises:
        PlanError: as `plan_reshard` and `verify`; or ranks appear twice.
    """
    plans = [plan_reshard(src, replica, src_ranks=src_ranks, dst_ranks=r) for r in replica_ranks]
    return Relay(proofs=tuple(verify(plan) for plan in plans))


def _stream(plan: Plan, rank: int) -> list[tuple[Any, ...]]:
    """What a rank receives and where it writes it, without its own number."""
    return [(t.src_rank, t.name, t.box, t.dst, t.dtype) for t in plan.receives(rank)]


def _check_apart(plans: Sequence[Plan]) -> None:
    ranks = [rank for plan in plans for rank in plan.dst_ranks]
    sources = {rank for plan in plans for rank in plan.src_ranks}
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1 or rank in sources})
    if twice:
        raise PlanError(
            f"ranks {twice} have two places in the chain; a relay needs sources and replicas on "
            "ranks of their own"
        )
