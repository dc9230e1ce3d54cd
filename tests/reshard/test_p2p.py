"""Laws of the executors: every element arrives, for any ranks and buckets; failures have names."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardloop.errors import WorkerDied
from shardloop.parallel.context import RankContext
from shardloop.reshard import p2p
from shardloop.reshard.buckets import Lane, flat_range
from shardloop.reshard.cost import cost
from shardloop.reshard.gather import execute_gather
from shardloop.reshard.p2p import execute_p2p
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import Proof, verify
from tests.harness import run_ranks
from tests.reshard.live import assert_same, cut, empty, error_of, layouts, random_state

TIED = {"tie_word_embeddings": True}
MHA = {"num_key_value_heads": 4}
CASES: list[tuple[str, str, list[int], list[int], dict[str, Any]]] = [
    ("fsdp=2", "engine:tp=2", [0, 1], [2, 3], {}),
    ("fsdp=2", "engine:tp=1", [0, 1], [2], TIED),
    ("fsdp=1", "engine:tp=2", [0], [1, 2], {}),
    ("fsdp=3", "engine:tp=2", [0, 1, 2], [3, 4], TIED),
    ("fsdp=4", "engine:tp=2", [0, 1, 2, 3], [3, 4], MHA),
    ("fsdp=2", "engine:tp=4", [4, 1], [3, 2, 1, 0], {}),
    ("dp=2,fsdp=2", "engine:tp=1", [0, 1, 2, 3], [4], {}),
    ("fsdp=2,tp=2", "engine:tp=4", [0, 1, 2, 3], [0, 1, 2, 3], {}),
    ("fsdp=5", "fsdp=2", [0, 1, 2, 3, 4], [1, 4], {}),
    ("engine:tp=2", "engine:tp=4", [0, 1], [1, 2, 3, 4], {}),
]
"""Uneven shards, padded vocabularies, repeated kv heads, replicas; other or shared ranks."""


def _proof(case: tuple[str, str, list[int], list[int], dict[str, Any]]) -> Proof:
    src_spec, dst_spec, src_ranks, dst_ranks, changes = case
    src, dst = layouts(src_spec, dst_spec, **changes)
    return verify(plan_reshard(src, dst, src_ranks=src_ranks, dst_ranks=dst_ranks))


def _local(proof: Proof, rank: int, seed: int) -> tuple[Any, Any, Any]:
    """Source tensors, zeroed destination tensors and the expected ones, None where no role."""
    plan = proof.plan
    state = random_state(plan.src.model, seed=seed)
    src = dst = expected = None
    if rank in plan.src_ranks:
        src = cut(plan.src, plan.src_ranks.index(rank), state, dtype=torch.float32)
    if rank in plan.dst_ranks:
        place = plan.dst_ranks.index(rank)
        dst = empty(plan.dst, place, dtype=torch.bfloat16)
        rounded = {name: t.to(torch.bfloat16) for name, t in state.items()}
        expected = cut(plan.dst, place, rounded, dtype=torch.bfloat16)
    return src, dst, expected


def _all_cases(context: RankContext) -> list[list[tuple[int, int, int]]]:
    """Per case and bucket size: bytes sent, received, and copied locally on this rank."""
    results = []
    for case in CASES:
        proof, moved = _proof(case), []
        for seed, bucket_bytes in enumerate((64 if case is CASES[3] else 600, 2000, 32 * 2**20)):
            src, dst, expected = _local(proof, context.rank, seed)
            args = {"dtype": torch.bfloat16, "group": dist.group.WORLD}
            report = execute_p2p(proof, src=src, dst=dst, bucket_bytes=bucket_bytes, **args)
            if dst is not None:
                assert_same(dst, expected)
                for tensor in dst.values():
                    tensor.zero_()
            assert report.peak_extra_bytes <= 4 * bucket_bytes
            moved.append((report.bytes_sent, report.bytes_received, report.local_bytes))
        gathered = execute_gather(proof, src=src, dst=dst, **args)
        if dst is not None:
            assert_same(dst, expected)
        moved.append((gathered.bytes_sent, gathered.bytes_received, 0))
        results.append(moved)
    return results


def test_every_element_arrives_bit_equal_for_any_ranks_bucket_sizes_and_update() -> None:
    """And wire bytes are the minimum, those of the plan; and gathering gives the same tensors."""
    by_rank = run_ranks(_all_cases, 5, timeout_s=120)
    for index, case in enumerate(CASES):
        expected = cost(_proof(case).plan, itemsize=2)
        runs = [[by_rank[rank][index][run] for rank in range(5)] for run in range(4)]
        for run in runs[:3]:
            sent, received, local = (sum(column) for column in zip(*run, strict=True))
            assert sent == received == expected.minimum_bytes, case
            assert [sent for sent, _, _ in run] == [expected.send_bytes.get(r, 0) for r in range(5)]
        gathered = sum(sent for sent, _, _ in runs[3])
        assert gathered > expected.minimum_bytes, case
        assert local > 0 or not {*case[2]} & {*case[3]}


def _refusals(context: RankContext) -> list[Any]:
    """What each rank sees when one rank is wrong; between them, a transfer that works."""
    proof = _proof(CASES[0])
    seen = []
    for fault in ("dtype", "strides", "missing", "bucket", "role", "none"):
        src, dst, expected = _local(proof, context.rank, 0)
        bucket_bytes = 64
        if fault == "dtype" and context.rank == 3:
            dst = {**dst, "model.norm.weight": torch.zeros(24)}
        if fault == "strides" and context.rank == 2:
            dst = {**dst, "lm_head.weight": dst["lm_head.weight"].t().contiguous().t()}
        if fault == "missing" and context.rank == 0:
            del src["model.norm.weight"]
        if fault == "bucket" and context.rank == 1:
            bucket_bytes = 128
        if fault == "role" and context.rank == 1:
            src = None
        seen.append(
            error_of(
                lambda s=src, d=dst, b=bucket_bytes: execute_p2p(
                    proof,
                    src=s,
                    dst=d,
                    dtype=torch.bfloat16,
                    group=dist.group.WORLD,
                    bucket_bytes=b,
                    timeout_s=5.0,
                )
            )
        )
        if fault != "none" and dst is not None:
            assert all(not tensor.any() for tensor in dst.values()), "a byte moved"
    if dst is not None:
        assert_same(dst, expected)
    return seen


def test_a_fault_on_one_rank_is_an_error_on_all_and_moves_no_byte() -> None:
    by_rank = run_ranks(_refusals, 4, timeout_s=30)
    guilty = {0: (3, "dtype of model.norm.weight is torch.float32, it must be torch.bfloat16")}
    guilty[1] = (2, "strides of lm_head.weight")
    guilty[2] = (0, "missing: model.norm.weight of shape (12,)")
    guilty[4] = (1, "passed src=None")
    for index, (culprit, text) in guilty.items():
        for rank in range(4):
            kind, message = by_rank[rank][index]
            refused_elsewhere = rank != culprit and "refused" in message
            assert kind == ("OtherRankRefused" if refused_elsewhere else "PlanError")
            assert (text if rank == culprit else f"ranks [{culprit}] refused") in message
    for rank in range(4):
        assert "the ranks disagree" in by_rank[rank][3][1]
        assert f"bucket_bytes={128 if rank == 1 else 64}" in by_rank[rank][3][1]
        assert by_rank[rank][5] is None


def _strided_source(context: RankContext) -> None:
    proof = _proof(CASES[0])
    src, dst, expected = _local(proof, context.rank, 0)
    if src is not None:
        src = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in src.items()}
    for bucket_bytes in (64, 2**20):
        execute_p2p(
            proof,
            src=src,
            dst=dst,
            dtype=torch.bfloat16,
            group=dist.group.WORLD,
            bucket_bytes=bucket_bytes,
        )
        if dst is not None:
            assert_same(dst, expected)


def test_sources_of_any_strides_are_sent_right() -> None:
    run_ranks(_strided_source, 4, timeout_s=30)


def _broken_receiver(context: RankContext, how: str, folder: str) -> None:
    """Rank 2 dies or hangs at its third bucket; each rank writes down what it saw, and when."""
    proof = _proof(("fsdp=2", "engine:tp=2", [0, 1], [2, 3], {}))
    src, dst, _ = _local(proof, context.rank, 0)
    count = 0
    plain = p2p.unpack

    def unpack(*args: Any) -> None:
        nonlocal count
        count += 1
        if context.rank == 2 and count == 3:
            if how == "dies":
                os._exit(9)
            time.sleep(1.5)
        plain(*args)

    p2p.unpack = unpack
    dist.barrier()
    start = time.monotonic()
    error = error_of(
        lambda: execute_p2p(
            proof,
            src=src,
            dst=dst,
            dtype=torch.bfloat16,
            group=dist.group.WORLD,
            bucket_bytes=64,
            timeout_s=0.5 if how == "hangs" else 20.0,
        )
    )
    seen = json.dumps([error, time.monotonic() - start])
    Path(folder, f"{context.rank}.json").write_text(seen)
    if how == "hangs":
        time.sleep(max(0.0, 2.0 - (time.monotonic() - start)))


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_receiver_is_a_named_error_on_its_senders_within_the_timeout(
    how: str, tmp_path: Path
) -> None:
    if how == "dies":
        with pytest.raises(WorkerDied, match="rank 2"):
            run_ranks(_broken_receiver, 4, how, str(tmp_path), timeout_s=40)
    else:
        run_ranks(_broken_receiver, 4, how, str(tmp_path), timeout_s=40)
    for rank in (0, 1):
        (kind, message), seconds = json.loads((tmp_path / f"{rank}.json").read_text())
        assert kind in ({"WorkerDied"} if how == "dies" else {"WorkerTimeout", "WorkerDied"})
        assert "rank" in message and "bucket" in message and "->" in message
        assert seconds < 5.0
    kinds = {json.loads((tmp_path / f"{rank}.json").read_text())[0][0] for rank in (0, 1)}
    assert how == "dies" or "WorkerTimeout" in kinds


def test_flat_ranges_and_buckets_visit_each_element_once_in_order(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(200):
        shape = [draw(1, 6) for _ in range(draw(1, 4))]
        storage = torch.arange(10_000)[: int(torch.tensor(shape).prod()) * 8]
        steps = [draw(1, 3) for _ in shape]
        storage = storage.reshape([n * 2 for n in shape] + [-1])[..., 0]
        view = storage[tuple(slice(0, n * s, s) for n, s in zip(shape, steps, strict=True))]
        start = draw(0, view.numel() + 1)
        stop = draw(start, view.numel() + 1)
        parts = [part.flatten() for part in flat_range(view, start, stop) if stop > start]
        found = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
        assert torch.equal(found, view.flatten()[start:stop])
        lane = Lane(draw(1, 9), [view, view])
        sizes = [sum(part.numel() for part in bucket) for bucket in lane.buckets()]
        assert len(sizes) == lane.num_buckets
        assert sum(sizes) == lane.size and {*sizes[:-1]} <= {lane.limit}
        flat = torch.cat([part.flatten() for bucket in lane.buckets() for part in bucket])
        assert torch.equal(flat, torch.cat([view.flatten(), view.flatten()]))
