"""Laws of the relay: every replica is right, and no source sends more than one replica needs."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardloop.errors import PlanError, WorkerDied
from shardloop.parallel.context import RankContext
from shardloop.reshard.cost import cost
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import verify
from shardloop.transport import p2p
from shardloop.transport.p2p import P2P
from shardloop.transport.relay import Hop, Relay, plan_relay
from tests.harness import run_ranks
from tests.transport.live import assert_same, cut, empty, error_of, layouts, random_state

BF16 = torch.bfloat16
CASES = [
    ("fsdp=2", "engine:tp=1", [4, 1], [[2], [0], [3]]),
    ("fsdp=1", "engine:tp=2", [0], [[1, 2], [4, 3]]),
    ("fsdp=3", "engine:tp=2", [0, 1, 2], [[3, 4]]),
]


def _relay(case: tuple[str, str, list[int], list[list[int]]]) -> Relay:
    src_spec, dst_spec, src_ranks, replica_ranks = case
    src, replica = layouts(src_spec, dst_spec)
    return plan_relay(src, replica, src_ranks=src_ranks, replica_ranks=replica_ranks)


def _sides(relay: Relay, rank: int, seed: int) -> tuple[Any, Any, Any]:
    plan = relay.proof_of(rank).plan
    state = random_state(plan.src.model, seed=seed)
    src = dst = expected = None
    if rank in plan.src_ranks:
        src = cut(plan.src, plan.src_ranks.index(rank), state, dtype=torch.float32)
    if rank in plan.dst_ranks:
        place = plan.dst_ranks.index(rank)
        dst = empty(plan.dst, place, dtype=BF16)
        expected = cut(plan.dst, place, state, dtype=BF16)
    return src, dst, expected


def _transport(relay: Relay, rank: int, **settings: Any) -> P2P:
    group = dist.group.WORLD
    hop = relay.hop(rank)
    return P2P(relay.proof_of(rank), dtype=BF16, group=group, hop=hop, **settings)


def _all_cases(context: RankContext) -> list[list[tuple[int, int]]]:
    """Per case and update: bytes sent and received; the second readers are slow."""
    plain = p2p.unpack

    def unpack(*args: Any) -> None:
        time.sleep(0.001 if context.rank == 0 else 0)
        plain(*args)

    p2p.unpack = unpack
    results = []
    for case in CASES:
        relay, moved = _relay(case), []
        for bucket_bytes in (64, 1000, 2**20):
            transport = _transport(relay, context.rank, bucket_bytes=bucket_bytes)
            for seed in range(2):
                src, dst, expected = _sides(relay, context.rank, seed)
                report = transport.move(src, dst)
                if dst is not None:
                    assert_same(dst, expected)
                assert report.peak_extra_bytes <= 2 * bucket_bytes
                moved.append((report.bytes_sent, report.bytes_received))
        results.append(moved)
    return results


def test_sources_send_one_replica_and_all_replicas_are_right() -> None:
    by_rank = run_ranks(_all_cases, 5, timeout_s=60)
    for index, case in enumerate(CASES):
        plan = _relay(case).proofs[0].plan
        once, num_replicas = cost(plan, itemsize=2), len(case[3])
        for run in zip(*(by_rank[rank][index] for rank in range(5)), strict=True):
            sent, received = (sum(column) for column in zip(*run, strict=True))
            assert sent == received == num_replicas * once.minimum_bytes
            for rank in case[2]:
                assert run[rank] == (once.send_bytes[rank], 0)
            for rank in case[3][-1]:
                assert run[rank][0] == 0, "the last replica passes nothing on"


def _broken_middle(context: RankContext, folder: str) -> None:
    relay = _relay(CASES[0])
    src, dst, _ = _sides(relay, context.rank, 0)
    count = 0
    plain = p2p.unpack

    def unpack(*args: Any) -> None:
        nonlocal count
        count += 1
        if context.rank == 0 and count == 3:
            os._exit(9)
        plain(*args)

    p2p.unpack = unpack
    transport = _transport(relay, context.rank, bucket_bytes=64, timeout_s=20.0)
    start = time.monotonic()
    error = error_of(lambda: transport.move(src, dst))
    Path(folder, f"{context.rank}.json").write_text(json.dumps([error, time.monotonic() - start]))


def test_a_lost_replica_is_a_named_error_before_and_after_it(tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match="rank 0"):
        run_ranks(_broken_middle, 5, str(tmp_path), timeout_s=40)
    for rank, text in ((2, "passed on to rank 0"), (3, "from rank 0")):
        (kind, message), seconds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert kind == "WorkerDied" and text in message and "bucket" in message
        assert seconds < 10.0


def test_each_replica_receives_from_its_equal_and_passes_on_to_it() -> None:
    relay = _relay(("fsdp=1", "engine:tp=2", [0], [[1, 2], [4, 3], [6, 5]]))
    hops = [relay.hop(rank) for rank in range(7)]
    assert hops[0] == Hop(0)
    assert hops[1:3] == [Hop(1, None, 4), Hop(2, None, 3)]
    assert hops[3:5] == [Hop(3, 2, 5), Hop(4, 1, 6)]
    assert hops[5:] == [Hop(5, 3, None), Hop(6, 4, None)]


def test_a_chain_of_unequal_replicas_or_shared_ranks_is_refused() -> None:
    src, replica = layouts("fsdp=2", "engine:tp=2")
    other, replicated = layouts("fsdp=1", "fsdp=2")
    with pytest.raises(PlanError, match=r"ranks \[1, 3\] have two places in the chain"):
        plan_relay(src, replica, src_ranks=[0, 1], replica_ranks=[[1, 2], [3, 4], [5, 3]])
    proofs = [
        verify(plan_reshard(a, b, src_ranks=ranks, dst_ranks=to))
        for a, b, ranks, to in (
            (src, replica, [0, 1], [2, 3]),
            (src, replicated, [0, 1], [4, 5]),
            (other, replica, [0], [4, 5]),
            (src, replica, [1, 0], [4, 5]),
        )
    ]
    for proof in proofs[1:]:
        with pytest.raises(PlanError, match="rank 4 of replica 1 needs another stream than rank 2"):
            Relay(proofs=(proofs[0], proof))
