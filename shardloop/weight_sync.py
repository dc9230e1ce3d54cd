"""Brings the trainer's weights into the engine, whole or not at all. Called by the loops. Floor 3.

    every rank of both roles                                     an engine in between
    ─────────────────────────                                    ────────────────────
    check the call and the tensors                               generates with the old weights
    engine.begin_update(version)                                 refuses to generate
    agree                            error: cancel_update        generates with the old weights
    the transport moves              error: half written         refuses to generate
    fingerprints of both sides       differ: FingerprintError    refuses to generate
    engine.commit_update()           error: run cannot go on     generates with the new weights

The transport starts when all ranks agree, and each step after it when the one before has passed on
all of them. What one rank raises outside of the transport, all do at once, and name that rank.
The next sync after a failed one begins again and writes everything; its report names the version
that was left half written.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.config import TransportName
from shardloop.errors import PlanError
from shardloop.parallel.agree import act_together, agree, all_reduce
from shardloop.reshard.copies import find_copies
from shardloop.reshard.cost import cost
from shardloop.reshard.fingerprint import check_fingerprints, local_fingerprints, num_prints
from shardloop.reshard.plan import Plan
from shardloop.reshard.verify import Proof
from shardloop.transport.base import BUCKET_BYTES, TransferReport, check_members, check_tensors
from shardloop.transport.buckets import Tensors
from shardloop.transport.choice import check_transport, make_transport
from shardloop.transport.relay import Relay

T = TypeVar("T")


class Source(Protocol):
    """What a trainer shows of itself here."""

    @property
    def version(self) -> int: ...

    def shards(self) -> Mapping[str, Tensor]: ...


class Target(Protocol):
    """What an engine shows of itself here."""

    def tensors(self) -> Mapping[str, Tensor]: ...

    def begin_update(self, version: int) -> None: ...

    def cancel_update(self) -> None: ...

    def commit_update(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncReport:
    """What one update did, on all ranks together but for `transfer`."""

    version: int
    seconds: float
    """On this rank, from the call to the commit."""
    check_seconds: float
    """Of these, for the fingerprints."""
    wire_bytes: int
    """Sent to other ranks, measured, by all ranks."""
    received_bytes: int
    """Received from other ranks, by all ranks."""
    source_bytes: int
    """Of the sent bytes, those that left the source ranks: in a relay, one replica's."""
    minimum_bytes: int
    """What the destinations need and do not already hold, by the plan."""
    peak_extra_bytes: int
    """Most that any rank staged."""
    density: float | None
    """Share of the elements that were sent; None where the transport can leave none out."""
    replaced_version: int | None
    """The version that a failed update had left half written, and this one wrote over."""
    transfer: TransferReport
    """This rank's share."""


class WeightSync:
    """Moves weights from a trainer to an engine along one proved plan."""

    def __init__(
        self,
        trainer: Source | None,
        engine: Target | None,
        *,
        proof: Proof | Relay,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        transport: TransportName = "p2p",
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        """Collective over `group`: agree that all ranks have the same plan.

        Args:
            trainer: on the source ranks of the plan, None elsewhere.
            engine: on the destination ranks, None elsewhere. Colocated ranks have both.
            proof: of the plan from the trainer's layout to the engine's; or a relay, by whose
                chain the replicas of the engine pass the weights on.
            group: contains all ranks of both sides.
            dtype: of the engine's tensors, but for those whose dtype the model declares; the
                trainer's are converted to it.
            transport: see `transport.choice`.
            bucket_bytes, timeout_s: see `execute_p2p`.
        Raises:
            PlanError: on all ranks: different plans, or a role without its object.
            WorkerDied, WorkerTimeout: "shm": the ranks are not on one host.
        """
        self._trainer, self._engine = trainer, engine
        self._proofs = proof.proofs if isinstance(proof, Relay) else (proof,)
        self._group, self._dtype, self._timeout_s = group, dtype, timeout_s
        self._open_version: int | None = None
        plans = [each.plan for each in self._proofs]
        self._minimum_bytes = sum(cost(p, itemsize=dtype.itemsize).minimum_bytes for p in plans)
        fault: PlanError | None = None
        try:
            self._copies = find_copies(plans[0].src), find_copies(plans[0].dst)
            _check_roles(plans, trainer, engine)
            check_transport(proof, transport)
            for plan in plans:
                check_members(plan, group)
        except PlanError as error:
            fault = error
        digests = " ".join(each.digest for each in self._proofs)
        self._same = f"plan {digests}, dtype={dtype}, {transport=}, {bucket_bytes=}"
        what = "the set-up of the weight sync"
        agree(group, fault=fault, same=self._same, what=what, timeout_s=timeout_s)
        self._transport = make_transport(
            proof,
            transport,
            dtype=dtype,
            group=group,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
        )

    def sync(self, version: int) -> SyncReport:
        """Collective over the group: the engine holds the trainer's weights `version` afterwards.

        Raises (on all ranks):
            PlanError: before anything changed: tensors do not fit, the ranks were called with
                different versions or on syncs of different plans, or the trainer is at another
                version.
            FingerprintError: the weights differ after the transfer; names the tensors.
            ShardloopError: what the trainer or the engine of a rank raised, as a WorkerError where
                it is none of ours; an OtherRankRefused with rank and reason on the other ranks.
            WorkerDied, WorkerTimeout: a rank went away; start a new group.
        """
        start = time.perf_counter()
        src, dst = self._begin(version)
        replaced, self._open_version = self._open_version, version
        transfer = self._transport.move(src, dst)
        transferred = time.perf_counter()
        counters = self._check_weights(src, dst, transfer)
        sent, received, from_sources, num_sent, num_due, *staged = counters
        self._commit(version)
        self._open_version = None
        end = time.perf_counter()
        return SyncReport(
            version=version,
            seconds=end - start,
            check_seconds=end - transferred,
            wire_bytes=sent,
            received_bytes=received,
            source_bytes=from_sources,
            minimum_bytes=self._minimum_bytes,
            peak_extra_bytes=max(staged),
            density=num_sent / num_due if num_due else None,
            replaced_version=replaced,
            transfer=transfer,
        )

    def close(self) -> None:
        """Give the transport's memory and connections back; no rank waits for another."""
        self._transport.close()

    def _begin(self, version: int) -> tuple[Tensors | None, Tensors | None]:
        """Collective over the group: all engines have begun the update, or none has.

        Returns:
            The live tensors of this rank's trainer and engine.
        """
        begun: Target | None = None

        def begin() -> tuple[Tensors | None, Tensors | None]:
            nonlocal begun
            src = self._trainer.shards() if self._trainer else None
            dst = self._engine.tensors() if self._engine else None
            self._check_call(version, src, dst)
            if self._engine:
                self._engine.begin_update(version)
                begun = self._engine
            return src, dst

        try:
            return self._act(
                begin, what=f"the update to version {version}", same=f"{version=}, {self._same}"
            )
        except BaseException:
            if begun is not None:
                begun.cancel_update()
            raise

    def _commit(self, version: int) -> None:
        """Collective over the group: passes when every engine rank has accepted its weights."""
        what = f"generation with version {version}"

        def commit() -> None:
            if self._engine:
                self._engine.commit_update()

        self._act(commit, what=what, same=what)

    def _act(self, action: Callable[[], T], *, what: str, same: str) -> T:
        return act_together(self._group, action, what=what, same=same, timeout_s=self._timeout_s)

    def _check_call(self, version: int, src: Tensors | None, dst: Tensors | None) -> None:
        if self._trainer and self._trainer.version != version:
            raise PlanError(
                f"sync to version {version}, but the trainer is at version "
                f"{self._trainer.version}; pass the trainer's version"
            )
        plan = self._plan_of(dist.get_rank())
        check_tensors(plan, dist.get_rank(), src=src, dst=dst, dtype=self._dtype)

    def _plan_of(self, rank: int) -> Plan:
        """The plan in which `rank` has its role: sources have theirs in all."""
        plans = [proof.plan for proof in self._proofs]
        return next((plan for plan in plans if rank in plan.dst_ranks), plans[0])

    def _check_weights(
        self, src: Tensors | None, dst: Tensors | None, transfer: TransferReport
    ) -> list[int]:
        """Collective over the group: compare the fingerprints of both sides, each replica's too.

        Returns:
            Bytes sent, received, and sent by source ranks, elements sent and due, of all ranks;
            and what each one staged.
        """
        what = "the comparison of both sides after the transfer"
        prints = self._act(lambda: self._prints(src, dst), what=what, same=what)
        names, src_ranks = self._copies[0].names, self._proofs[0].plan.src_ranks
        from_sources = transfer.bytes_sent if dist.get_rank() in src_ranks else 0
        staged = [0] * dist.get_world_size(self._group)
        staged[dist.get_rank(self._group)] = transfer.peak_extra_bytes
        counters = torch.tensor(
            [
                *(transfer.bytes_sent, transfer.bytes_received, from_sources),
                *(transfer.num_sent, transfer.num_sent + transfer.num_left_out, *staged),
            ]
        )
        values = torch.cat([*(part.flatten() for part in prints), counters])
        total = all_reduce(values, self._group, what=what, timeout_s=self._timeout_s)
        rows = total[: -len(counters)].view(-1, len(names))
        check_fingerprints(names, rows[: len(prints[0])], rows[len(prints[0]) :])
        found: list[int] = total[-len(counters) :].tolist()
        return found

    def _prints(self, src: Tensors | None, dst: Tensors | None) -> list[Tensor]:
        """This rank's share of the fingerprints: of the source, then of each replica."""
        of_src, of_dst = self._copies
        sides = [(self._proofs[0].plan.src_ranks, src, of_src)]
        sides += [(p.plan.dst_ranks, dst, of_dst) for p in self._proofs]
        rank, num_names = dist.get_rank(), len(of_src.names)
        prints = []
        for ranks, tensors, copies in sides:
            if tensors is None or rank not in ranks:
                prints.append(torch.zeros(num_prints(copies), num_names, dtype=torch.int64))
                continue
            place = ranks.index(rank)
            prints.append(local_fingerprints(copies, place, tensors, dtype=self._dtype))
        return prints


def _check_roles(plans: list[Plan], trainer: Source | None, engine: Target | None) -> None:
    rank = dist.get_rank()
    targets = [target for plan in plans for target in plan.dst_ranks]
    for role, ranks, given in (
        ("trainer", [*plans[0].src_ranks], trainer),
        ("engine", targets, engine),
    ):
        if (rank in ranks) != (given is not None):
            raise PlanError(
                f"rank {rank} passed {role}={given!r}, but the {role} ranks are {ranks}; "
                f"pass the {role} on these and None on all others"
            )
