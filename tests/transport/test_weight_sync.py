"""Laws of the weight update: whole or not at all, on every rank, and never a silent difference."""

from math import prod
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.delta.codec import HEADER_BYTES
from shardloop.errors import ModelError
from shardloop.layout import Layout
from shardloop.parallel.context import RankContext
from shardloop.reshard.cost import cost
from shardloop.reshard.plan import Plan, plan_reshard
from shardloop.reshard.verify import Proof, verify
from shardloop.transport.delta import CLAIM_BYTES
from shardloop.transport.relay import plan_relay
from shardloop.weight_sync import SyncReport, TransportName, WeightSync
from tests.harness import run_ranks
from tests.transport.live import assert_same, cut, empty, error_of, layouts, random_state

BF16 = torch.bfloat16
WORLD = 4


class ShardedTrainer:
    def __init__(self, layout: Layout, place: int) -> None:
        self._layout, self._place = layout, place
        self.load(version=1)

    def load(self, *, version: int) -> None:
        state = random_state(self._layout.model, seed=version)
        self.version = version
        self.tensors = cut(self._layout, self._place, state, dtype=torch.float32)

    def shards(self) -> dict[str, Tensor]:
        return self.tensors


class ShardedEngine:
    """Generates (says its version) only between a commit and the next update."""

    def __init__(self, layout: Layout, place: int) -> None:
        self._layout, self._place = layout, place
        self.weights = empty(layout, place, dtype=BF16)
        self.version: int | None = None
        self.refuses = False
        self._before: int | None = None
        self._coming = -1

    def tensors(self) -> dict[str, Tensor]:
        return self.weights

    def begin_update(self, version: int) -> None:
        self._before, self.version, self._coming = self.version, None, version

    def cancel_update(self) -> None:
        self.version = self._before

    def commit_update(self) -> None:
        if self.refuses:
            raise ModelError("not all elements are finite")
        self.version = self._coming

    def assert_is_fresh(self, version: int) -> None:
        """As an engine that never held anything else: bit for bit, padding aside (here 0)."""
        assert self.version == version
        state = random_state(self._layout.model, seed=version)
        assert_same(self.weights, cut(self._layout, self._place, state, dtype=BF16))


PLANNED: list[TransportName] = [name for name in get_args(TransportName) if name != "relay"]
"""The transports that carry out one plan."""


def _roles(
    rank: int, src: Layout, dst: Layout, src_ranks: list[int], dst_ranks: list[int]
) -> tuple[Any, Any]:
    trainer = ShardedTrainer(src, src_ranks.index(rank)) if rank in src_ranks else None
    engine = ShardedEngine(dst, dst_ranks.index(rank)) if rank in dst_ranks else None
    return trainer, engine


CASES: list[tuple[str, str, list[int], list[int], dict[str, Any]]] = [
    ("fsdp=2", "engine:tp=2", [0, 1], [2, 3], {}),
    ("fsdp=3", "engine:tp=1", [0, 1, 2], [3], {"tie_word_embeddings": True}),
    ("dp=2,fsdp=2", "engine:tp=4", [0, 1, 2, 3], [0, 1, 2, 3], {}),
    ("fsdp=2,tp=2", "engine:tp=2", [0, 1, 2, 3], [2, 1], {"tie_word_embeddings": True}),
]


def _updates(context: RankContext, case: tuple[Any, ...]) -> dict[str, list[SyncReport]]:
    src_spec, dst_spec, src_ranks, dst_ranks, changes = case
    src, dst = layouts(src_spec, dst_spec, **changes)
    proof = verify(plan_reshard(src, dst, src_ranks=src_ranks, dst_ranks=dst_ranks))
    reports = {}
    for transport in PLANNED:
        trainer, engine = _roles(context.rank, src, dst, src_ranks, dst_ranks)
        sync = WeightSync(
            trainer,
            engine,
            proof=proof,
            group=dist.group.WORLD,
            dtype=BF16,
            transport=transport,
            bucket_bytes=500,
        )
        reports[transport] = _three_updates(sync, trainer, engine)
    return reports


def _three_updates(sync: WeightSync, trainer: Any, engine: Any) -> list[SyncReport]:
    reports = []
    for version in (1, 2, 7):
        if trainer:
            trainer.load(version=version)
        reports.append(sync.sync(version))
        if engine:
            engine.assert_is_fresh(version)
    sync.close()
    return reports


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}->{case[1]}")
def test_each_update_leaves_a_fresh_engine_and_counts_its_bytes(case: tuple[Any, ...]) -> None:
    """The least possible; for the naive reference, those of whole tensors; in a delta of which all
    is new, some more for each bucket."""
    src_spec, dst_spec, src_ranks, dst_ranks, changes = case
    src, dst = layouts(src_spec, dst_spec, **changes)
    plan = plan_reshard(src, dst, src_ranks=src_ranks, dst_ranks=dst_ranks)
    minimum = cost(plan, itemsize=2).minimum_bytes
    by_rank = run_ranks(_updates, WORLD, case, timeout_s=60)
    for by_transport in by_rank:
        for transport, reports in by_transport.items():
            num_messages = sum(seen[transport][0].transfer.messages for seen in by_rank)
            wire = {
                "gather": _gathered_bytes(plan),
                "delta": minimum + (HEADER_BYTES + CLAIM_BYTES) * num_messages,
            }
            assert [report.version for report in reports] == [1, 2, 7]
            assert [report.replaced_version for report in reports] == [None] * 3
            for report in reports:
                assert report.minimum_bytes == minimum
                assert report.wire_bytes == report.received_bytes
                assert report.wire_bytes == wire.get(transport, minimum)
                assert report.density == (1.0 if transport == "delta" else None)
                assert report.wire_bytes >= report.source_bytes
                assert transport not in ("p2p", "shm") or report.peak_extra_bytes <= 4 * 504


def _gathered_bytes(plan: Plan) -> int:
    """Each box that the first source lacks comes to it once; each tensor goes to all others."""
    seen: set[Any] = set()
    to_first = 0
    for piece in (p for rank in range(plan.src.world_size) for p in plan.src.pieces(rank)):
        key = piece.name, piece.box
        if key not in seen and piece.rank > 0:
            to_first += 2 * prod(hi - lo for lo, hi in piece.box)
        seen.add(key)
    whole = sum(2 * prod(shape) for shape in plan.src.model.tensor_shapes().values())
    return to_first + (WORLD - 1) * whole


def _relayed_updates(context: RankContext) -> tuple[list[SyncReport], Any]:
    src, replica = layouts("fsdp=2", "engine:tp=1")
    relay = plan_relay(src, replica, src_ranks=[0, 1], replica_ranks=[[3], [2], [4]])
    trainer = ShardedTrainer(src, context.rank) if context.rank < 2 else None
    engine = None if trainer else ShardedEngine(replica, 0)
    settings: dict[str, Any] = {"proof": relay, "group": dist.group.WORLD, "dtype": BF16}
    refused = error_of(lambda: WeightSync(trainer, engine, transport="shm", **settings))
    settings["transport"] = "relay"
    sync = WeightSync(trainer, engine, bucket_bytes=500, **settings)
    reports = _three_updates(sync, trainer, engine)
    sync = WeightSync(trainer, engine, **settings)
    if context.rank == 4:
        flip(sync, engine)
    return reports, (refused, error_of(lambda: sync.sync(7)))


def test_a_relay_updates_and_checks_every_replica_while_sources_send_one() -> None:
    src, replica = layouts("fsdp=2", "engine:tp=1")
    once = cost(plan_reshard(src, replica), itemsize=2).minimum_bytes
    for reports, (refused, error) in run_ranks(_relayed_updates, 5, timeout_s=60):
        for report in reports:
            assert report.source_bytes == once
            assert report.wire_bytes == report.received_bytes == report.minimum_bytes == 3 * once
        assert refused[0] == "PlanError" and "'shm' was given a relay" in refused[1]
        assert error[0] == "FingerprintError" and DOWN in error[1]


def flip(sync: WeightSync, engine: ShardedEngine) -> None:
    """One bit of one weight changes with each transfer from now on."""
    plain = sync._transport.move

    def corrupting(*args: Any) -> Any:
        report = plain(*args)
        engine.weights[DOWN].view(torch.uint8)[-1, -2] ^= 1
        return report

    sync._transport.move = corrupting  # type: ignore[method-assign]


NORM = "model.norm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def _faulty_updates(context: RankContext) -> dict[str, Any]:
    """What this rank saw of each fault, as (error, version its engine has afterwards)."""
    src, dst = layouts("dp=2", "engine:tp=2")
    src_ranks, dst_ranks = [0, 1], [2, 3]
    trainer, engine = _roles(context.rank, src, dst, src_ranks, dst_ranks)
    seen: dict[str, Any] = {}
    reports: list[SyncReport] = []

    def proof(src: Layout, dst: Layout) -> Proof:
        return verify(plan_reshard(src, dst, src_ranks=src_ranks, dst_ranks=dst_ranks))

    def make(**changes: Any) -> WeightSync:
        settings: dict[str, Any] = {
            "trainer": trainer,
            "engine": engine,
            "proof": proof(src, dst),
            "group": dist.group.WORLD,
            "dtype": BF16,
            "timeout_s": 5.0,
        }
        return WeightSync(**{**settings, **changes})

    def note(what: str, call: Any) -> None:
        seen[what] = (error_of(call), engine.version if engine else None)

    other = layouts("fsdp=2", "engine:tp=2")[0] if context.rank == 1 else src
    note("other plan", lambda: make(proof=proof(other, dst)))
    note("no role", lambda: make(trainer=None))
    note("unknown transport", lambda: make(transport="rdma"))
    changes = {"vocab_size": 48} if context.rank == 3 else {}
    other_model = proof(*layouts("dp=2", "engine:tp=2", **changes))
    note("other model on one rank", lambda: make(proof=other_model))
    sync = make()
    note("good", lambda: sync.sync(1))
    note("other version on one rank", lambda: sync.sync(2 if context.rank == 2 else 1))
    note("trainer elsewhere", lambda: sync.sync(2))
    other_sync = make(bucket_bytes=64)
    note("other sync on one rank", lambda: (other_sync if context.rank == 0 else sync).sync(1))
    note("the other sync", lambda: other_sync.sync(1))

    if engine and context.rank == 3:
        flip(sync, engine)
    note("corrupted byte", lambda: sync.sync(1))
    sync = make()
    plain = sync._transport.move
    if engine and context.rank == 2:
        stale = {name: tensor.clone() for name, tensor in engine.weights.items()}
        sync._transport.move = lambda src, dst: plain(src, stale)  # type: ignore[method-assign]
    if trainer:
        trainer.load(version=2)
    note("stale half", lambda: sync.sync(2))
    sync._transport.move = plain  # type: ignore[method-assign]
    if context.rank == 1:
        trainer.tensors[NORM][0] += 1
    note("drifted replica", lambda: sync.sync(2))
    if trainer:
        trainer.load(version=2)
    if engine:
        engine.refuses = context.rank == 3
    note("refused commit", lambda: sync.sync(2))
    if engine:
        engine.refuses = False
    note("good again", lambda: reports.append(sync.sync(2)))
    note("and again", lambda: reports.append(sync.sync(2)))
    seen["replaced"] = [report.replaced_version for report in reports]
    if engine:
        engine.assert_is_fresh(2)
    return seen


def test_every_fault_is_an_error_on_every_rank_and_no_engine_generates_from_it() -> None:
    by_rank = run_ranks(_faulty_updates, WORLD, timeout_s=40)
    for rank, seen in enumerate(by_rank):
        engine = rank in (2, 3)
        assert seen["replaced"] == [2, None], "an update left half written is named by the next"
        for what in ("good", "good again"):
            assert seen[what] == (None, (1 if what == "good" else 2) if engine else None)
        for what, culprits, text in (
            ("other plan", (1,), ("the ranks disagree", "the ranks disagree")),
            ("no role", (0, 1), ("ranks [0, 1] refused", "passed trainer=None")),
            ("other model on one rank", (3,), ("the ranks disagree", "the ranks disagree")),
        ):
            (kind, message), version = seen[what]
            refused_elsewhere = "refused" in text[0] and rank not in culprits
            assert kind == ("OtherRankRefused" if refused_elsewhere else "PlanError")
            assert text[rank in culprits] in message
            assert version is None
        kind, message = seen["unknown transport"][0]
        assert kind == "PlanError" and "choose from p2p, shm, delta, relay, gather" in message
        assert seen["the other sync"] == (None, 1 if engine else None)
        for what in ("other version on one rank", "trainer elsewhere", "other sync on one rank"):
            (kind, _), version = seen[what]
            assert kind in ("PlanError", "OtherRankRefused")
            assert version == (1 if engine else None), "the old weights must stay usable"
        kind, message = seen["refused commit"][0]
        assert kind == ("ModelError" if rank == 3 else "OtherRankRefused")
        assert rank == 3 or "ranks [3] refused" in message
        for what, text in (
            ("corrupted byte", f"source and destination differ: {DOWN}"),
            ("stale half", "source and destination differ: lm_head.weight"),
            ("drifted replica", f"copies within the source disagree: {NORM}"),
        ):
            (kind, message), version = seen[what]
            assert kind == "FingerprintError" and text in message, (what, message)
            assert version is None
