"""What one rank alone raises in a weight update: all ranks hear of it at once, and why."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from shardloop import weight_sync
from shardloop.errors import ModelError
from shardloop.parallel.context import RankContext
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import verify
from shardloop.weight_sync import WeightSync
from tests.harness import run_ranks
from tests.transport.live import error_of, layouts
from tests.transport.test_weight_sync import BF16, ShardedEngine, ShardedTrainer

LONG_S = 600.0
"""No rank may wait for its peers so long: the harness gives up before."""


class Broken:
    """An object of which one method raises."""

    def __init__(self, whole: Any, method: str, error: Exception) -> None:
        self._whole, self._method, self._error = whole, method, error

    def __getattr__(self, name: str) -> Any:
        return self._fail if name == self._method else getattr(self._whole, name)

    def _fail(self, *_: Any, **__: Any) -> None:
        raise self._error


FAULTS: list[tuple[int, str, Exception]] = [
    (3, "begin_update", ModelError("no memory for it")),
    (2, "begin_update", RuntimeError("out of memory")),
    (2, "tensors", OSError("gone")),
    (0, "shards", ValueError("no shards")),
    (3, "commit_update", RuntimeError("cannot look")),
]
"""Rank, the method that raises there, and what."""


def _faults_of_one_rank(context: RankContext) -> list[tuple[Any, int | None]]:
    """Of each fault, then of the fingerprints, then of none: error, and the engine's version."""
    src, dst = layouts("fsdp=2", "engine:tp=2")
    proof = verify(plan_reshard(src, dst, src_ranks=[0, 1], dst_ranks=[2, 3]))
    trainer = ShardedTrainer(src, context.rank) if context.rank < 2 else None
    engine = None if trainer else ShardedEngine(dst, context.rank - 2)
    seen: list[tuple[Any, int | None]] = []

    def note(call: Callable[[], Any]) -> None:
        seen.append((error_of(call), engine.version if engine else None))

    sync = WeightSync(
        trainer, engine, proof=proof, group=dist.group.WORLD, dtype=BF16, timeout_s=LONG_S
    )
    sync.sync(1)
    if trainer:
        trainer.load(version=2)
    for rank, method, error in FAULTS:
        if rank == context.rank:
            sync._trainer = trainer and Broken(trainer, method, error)
            sync._engine = engine and Broken(engine, method, error)
        note(lambda: sync.sync(2))
        sync._trainer, sync._engine = trainer, engine
    plain = weight_sync.local_fingerprints
    if context.rank == 1:
        weight_sync.local_fingerprints = Broken(None, "prints", MemoryError("too large")).prints
    note(lambda: sync.sync(2))
    weight_sync.local_fingerprints = plain
    note(lambda: sync.sync(2))
    if engine:
        engine.assert_is_fresh(2)
    return seen


def test_what_one_rank_raises_all_ranks_raise_at_once_with_its_name_and_reason() -> None:
    """Before the transfer the engine goes on with its old weights; after it, with none."""
    guilty = [(rank, method, str(error)) for rank, method, error in FAULTS]
    guilty.append((1, "the fingerprints", "too large"))
    by_rank = run_ranks(_faults_of_one_rank, 4, timeout_s=60)
    for rank, seen in enumerate(by_rank):
        *failed, last = seen
        for (culprit, method, reason), ((kind, message), version) in zip(
            guilty, failed, strict=True
        ):
            named = "ModelError" if reason == "no memory for it" else "WorkerError"
            assert kind == (named if rank == culprit else "OtherRankRefused"), (method, message)
            assert reason in message
            assert named == "ModelError" == kind or f"rank {culprit}" in message
            if rank >= 2 and method in ("begin_update", "tensors", "shards"):
                assert version == 1, "the old weights serve on"
            elif rank >= 2 and method == "the fingerprints":
                assert version is None, "half checked, so it generates nothing"
        assert last == (None, 2 if rank >= 2 else None)


def test_a_call_with_another_version_leaves_the_engine_with_its_old_weights() -> None:
    for error, version in run_ranks(_other_version, 2, timeout_s=60):
        assert error[0] == "PlanError" and "the ranks disagree" in error[1]
        assert version in (None, 1)


def _other_version(context: RankContext) -> tuple[Any, int | None]:
    src, dst = layouts("fsdp=1", "engine:tp=1")
    proof = verify(plan_reshard(src, dst, src_ranks=[0], dst_ranks=[1]))
    trainer = ShardedTrainer(src, 0) if context.rank == 0 else None
    engine = None if trainer else ShardedEngine(dst, 0)
    sync = WeightSync(trainer, engine, proof=proof, group=dist.group.WORLD, dtype=torch.bfloat16)
    sync.sync(1)
    error = error_of(lambda: sync.sync(1 if trainer else 2))
    return error, engine.version if engine else None
