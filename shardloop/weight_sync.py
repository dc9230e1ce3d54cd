"""Brings the trainer's weights into the engine, whole or not at all. Called by the loops. Floor 3.

    every rank of both roles                                     an engine in between
    ─────────────────────────                                    ────────────────────
    agree on version and tensors     error: nothing changed      generates with the old weights
    engine.begin_update(version)                                 refuses to generate
    execute_p2p                      error: half written         refuses to generate
    fingerprints of both sides       differ: FingerprintError    refuses to generate
    engine.commit_update()           error: run cannot go on     generates with the new weights

A step starts on a rank when the one before has passed on all of them; a failed step raises on all.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.errors import PlanError, ShardloopError
from shardloop.parallel.agree import agree, all_reduce
from shardloop.reshard.cost import cost
from shardloop.reshard.fingerprint import check_fingerprints, find_copies, local_fingerprints
from shardloop.reshard.p2p import (
    BUCKET_BYTES,
    Tensors,
    TransferReport,
    check_tensors,
    execute_p2p,
)
from shardloop.reshard.plan import Plan
from shardloop.reshard.verify import Proof


class Source(Protocol):
    """What a trainer shows of itself here."""

    @property
    def version(self) -> int: ...

    def shards(self) -> Mapping[str, Tensor]: ...


class Target(Protocol):
    """What an engine shows of itself here."""

    def tensors(self) -> Mapping[str, Tensor]: ...

    def begin_update(self, version: int) -> None: ...

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
    """Sent over the wire, measured, by all ranks."""
    minimum_bytes: int
    """What the destinations need and do not already hold, by the plan."""
    transfer: TransferReport
    """This rank's share."""


class WeightSync:
    """Moves weights from a trainer to an engine along one proved plan."""

    def __init__(
        self,
        trainer: Source | None,
        engine: Target | None,
        *,
        proof: Proof,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = 60.0,
    ) -> None:
        """Collective over `group`: agree that all ranks have the same plan.

        Args:
            trainer: on the source ranks of the plan, None elsewhere.
            engine: on the destination ranks, None elsewhere. Colocated ranks have both.
            proof: of the plan from the trainer's layout to the engine's.
            group: contains all ranks of both sides.
            dtype: of the engine's tensors; the trainer's are converted to it.
            bucket_bytes, timeout_s: see `execute_p2p`.
        Raises:
            PlanError: on all ranks: different plans, or a role without its object.
        """
        self._trainer, self._engine = trainer, engine
        self._proof, self._group, self._dtype = proof, group, dtype
        self._bucket_bytes, self._timeout_s = bucket_bytes, timeout_s
        plan = proof.plan
        self._minimum_bytes = cost(plan, itemsize=dtype.itemsize).minimum_bytes
        fault: PlanError | None = None
        try:
            self._src_copies, self._dst_copies = find_copies(plan.src), find_copies(plan.dst)
            _check_roles(plan, trainer, engine)
        except PlanError as error:
            fault = error
        what = "the set-up of the weight sync"
        agree(group, fault=fault, same=f"plan {proof.digest}", what=what, timeout_s=timeout_s)

    def sync(self, version: int) -> SyncReport:
        """Collective over the group: the engine holds the trainer's weights `version` afterwards.

        Raises (on all ranks):
            PlanError: before anything changed: tensors do not fit, the ranks were called with
                different versions, or the trainer is at another one.
            FingerprintError: the weights differ after the transfer; names the tensors.
            ShardloopError: what an engine's `commit_update` raised; PlanError on the other ranks.
            WorkerDied, WorkerTimeout: a rank went away; start a new group.
        """
        start = time.perf_counter()
        src = self._trainer.shards() if self._trainer else None
        dst = self._engine.tensors() if self._engine else None
        agree(
            self._group,
            fault=self._fault(version, src, dst),
            same=f"version={version}",
            what=f"the update to version {version}",
            timeout_s=self._timeout_s,
        )
        if self._engine:
            self._engine.begin_update(version)
        transfer = execute_p2p(
            self._proof,
            src=src,
            dst=dst,
            dtype=self._dtype,
            group=self._group,
            bucket_bytes=self._bucket_bytes,
            timeout_s=self._timeout_s,
        )
        transferred = time.perf_counter()
        wire_bytes = self._check_weights(src, dst, transfer.bytes_sent)
        self._commit(version)
        end = time.perf_counter()
        return SyncReport(
            version=version,
            seconds=end - start,
            check_seconds=end - transferred,
            wire_bytes=wire_bytes,
            minimum_bytes=self._minimum_bytes,
            transfer=transfer,
        )

    def _commit(self, version: int) -> None:
        """Collective over the group: passes when every engine rank has accepted its weights."""
        fault: ShardloopError | None = None
        if self._engine:
            try:
                self._engine.commit_update()
            except ShardloopError as error:
                fault = error
        what = f"generation with version {version}"
        agree(self._group, fault=fault, same=what, what=what, timeout_s=self._timeout_s)

    def _fault(self, version: int, src: Tensors | None, dst: Tensors | None) -> PlanError | None:
        if self._trainer and self._trainer.version != version:
            return PlanError(
                f"sync to version {version}, but the trainer is at version "
                f"{self._trainer.version}; pass the trainer's version"
            )
        try:
            plan = self._proof.plan
            check_tensors(plan, dist.get_rank(), src=src, dst=dst, dtype=self._dtype)
        except PlanError as error:
            return error
        return None

    def _check_weights(self, src: Tensors | None, dst: Tensors | None, bytes_sent: int) -> int:
        """Collective over the group: compare the fingerprints of both sides; all bytes sent."""
        plan, rank, names = self._proof.plan, dist.get_rank(), self._src_copies.names
        sides = (
            (plan.src, plan.src_ranks, src, self._src_copies),
            (plan.dst, plan.dst_ranks, dst, self._dst_copies),
        )
        prints = []
        for layout, ranks, tensors, copies in sides:
            if tensors is None:
                prints.append(torch.zeros(copies.most, len(names), dtype=torch.int64))
                continue
            place = ranks.index(rank)
            prints.append(
                local_fingerprints(layout, place, tensors, dtype=self._dtype, copies=copies)
            )
        values = torch.cat([*(part.flatten() for part in prints), torch.tensor([bytes_sent])])
        what = "fingerprints after the transfer"
        total = all_reduce(values, self._group, what=what, timeout_s=self._timeout_s)
        of_src, of_dst = total[:-1].view(-1, len(names)).split([len(part) for part in prints])
        check_fingerprints(names, of_src, of_dst)
        return int(total[-1])


def _check_roles(plan: Plan, trainer: Source | None, engine: Target | None) -> None:
    rank = dist.get_rank()
    for role, ranks, given in (
        ("trainer", plan.src_ranks, trainer),
        ("engine", plan.dst_ranks, engine),
    ):
        if (rank in ranks) != (given is not None):
            raise PlanError(
                f"rank {rank} passed {role}={given!r}, but the {role} ranks are {list(ranks)}; "
                f"pass the {role} on these and None on all others"
            )
