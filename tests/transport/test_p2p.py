"""Laws of all executors: every element arrives, for any ranks and buckets; failures have names."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardloop.errors import WorkerDied
from shardloop.layout import make_layout
from shardloop.parallel.context import RankContext
from shardloop.reshard.cost import cost
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import Proof, verify
from shardloop.transport import p2p, shm
from shardloop.transport.gather import execute_gather
from shardloop.transport.p2p import execute_p2p
from shardloop.transport.shm import execute_shm
from tests.harness import run_ranks
from tests.transport.live import (
    assert_same,
    cut,
    empty,
    error_of,
    layouts,
    random_state,
    shared_mappings,
    small_model,
)

TIED = {"tie_word_embeddings": True}
MHA = {"num_key_value_heads": 4}
BF16 = torch.bfloat16
EXECUTORS = {"p2p": execute_p2p, "shm": execute_shm}
WORLD = 6
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
    ("fsdp=2", "engine:tp=4", [0, 1], [2, 3, 4, 5], {}),
    ("fsdp=2", "engine:replicas=2,tp=2", [3, 1], [2, 5, 0, 4], {}),
]
"""Uneven shards, padded vocabularies, repeated kv heads, replicas; other or shared ranks."""
ONE_ELEMENT = CASES[1]


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
        dst = empty(plan.dst, place, dtype=BF16)
        expected = cut(plan.dst, place, state, dtype=BF16)
    return src, dst, expected


def _all_cases(context: RankContext) -> list[list[tuple[int, int, int]]]:
    """Per case and run: bytes sent, received, and copied locally on this rank."""
    results = []
    for case in CASES:
        proof, moved = _proof(case), []
        seed = 0
        for execute in EXECUTORS.values():
            for bucket_bytes in (1 if case is ONE_ELEMENT else 600, 2000, 32 * 2**20):
                seed += 1
                src, dst, expected = _local(proof, context.rank, seed)
                args: dict[str, Any] = {"dtype": BF16, "group": dist.group.WORLD}
                report = execute(proof, src=src, dst=dst, bucket_bytes=bucket_bytes, **args)
                if dst is not None:
                    assert_same(dst, expected)
                roles = (src is not None) + (dst is not None)
                assert report.peak_extra_bytes <= 2 * roles * max(bucket_bytes, 8)
                moved.append((report.bytes_sent, report.bytes_received, report.local_bytes))
        if dst is not None:
            dst = empty(proof.plan.dst, proof.plan.dst_ranks.index(context.rank), dtype=BF16)
        gathered = execute_gather(proof, src=src, dst=dst, **args)
        if dst is not None:
            assert_same(dst, expected)
        moved.append((gathered.bytes_sent, gathered.bytes_received, 0))
        results.append(moved)
    return results


def test_every_element_arrives_bit_equal_for_any_ranks_bucket_sizes_and_update() -> None:
    """And wire bytes are the minimum, those of the plan; and gathering gives the same tensors."""
    by_rank = run_ranks(_all_cases, WORLD, timeout_s=120)
    for index, case in enumerate(CASES):
        expected = cost(_proof(case).plan, itemsize=2)
        runs = list(zip(*(by_rank[rank][index] for rank in range(WORLD)), strict=True))
        for run in runs[:-1]:
            sent, received, local = (sum(column) for column in zip(*run, strict=True))
            assert sent == received == expected.minimum_bytes, case
            by_plan = [expected.send_bytes.get(rank, 0) for rank in range(WORLD)]
            assert [sent for sent, _, _ in run] == by_plan
        assert sum(sent for sent, _, _ in runs[-1]) > expected.minimum_bytes, case
        assert local > 0 or not {*case[2]} & {*case[3]}


def _mixed_dtypes(context: RankContext) -> None:
    """Scales in float32, a weight in float8 and the rest in bfloat16; within a group of four."""
    model = small_model()
    declared = {"mlp.down_proj.weight": "float8_e4m3fn", "input_layernorm.weight": "float32"}
    assert declared.keys() <= {c.key for c in model.classes}
    classes = tuple(replace(c, dtype=declared.get(c.key)) for c in model.classes)
    model = replace(model, classes=classes)
    group = dist.new_group([0, 1, 2, 4])
    if context.rank not in (0, 1, 2, 4):
        return
    src, dst = make_layout(model, "fsdp=2"), make_layout(model, "engine:tp=2")
    proof = verify(plan_reshard(src, dst, src_ranks=[4, 1], dst_ranks=[2, 0]))
    for execute in (*EXECUTORS.values(), execute_gather):
        source, target, expected = _local(proof, context.rank, 7)
        limits = {} if execute is execute_gather else {"bucket_bytes": 300}
        execute(proof, src=source, dst=target, dtype=BF16, group=group, **limits)
        if target is not None:
            assert {t.dtype for t in target.values()} > {torch.float8_e4m3fn, torch.float32}
            assert_same(target, expected)


def test_each_tensor_moves_in_its_declared_dtype_bit_for_bit() -> None:
    run_ranks(_mixed_dtypes, 5, timeout_s=60)


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
                    dtype=BF16,
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
        for execute in EXECUTORS.values():
            if dst is not None:
                for tensor in dst.values():
                    tensor.zero_()
            args = {"group": dist.group.WORLD, "bucket_bytes": bucket_bytes}
            execute(proof, src=src, dst=dst, dtype=BF16, **args)
            if dst is not None:
                assert_same(dst, expected)


def test_sources_of_any_strides_are_sent_right() -> None:
    run_ranks(_strided_source, 4, timeout_s=30)


def _broken_receiver(context: RankContext, executor: str, how: str, folder: str) -> None:
    """Rank 2 dies or hangs at its third bucket; each rank writes down what it saw, and when."""
    proof = _proof(CASES[0])
    src, dst, _ = _local(proof, context.rank, 0)
    count = 0
    module = {"p2p": p2p, "shm": shm}[executor]
    plain = module.unpack

    def unpack(*args: Any) -> None:
        nonlocal count
        count += 1
        if context.rank == 2 and count == 3:
            if how == "dies":
                os._exit(9)
            time.sleep(1.5)
        plain(*args)

    module.unpack = unpack
    dist.barrier()
    start = time.monotonic()
    error = error_of(
        lambda: EXECUTORS[executor](
            proof,
            src=src,
            dst=dst,
            dtype=BF16,
            group=dist.group.WORLD,
            bucket_bytes=64,
            timeout_s=0.5 if how == "hangs" else 20.0,
        )
    )
    seen = json.dumps([error, time.monotonic() - start, shared_mappings()])
    Path(folder, f"{context.rank}.json").write_text(seen)
    if how == "hangs":
        time.sleep(max(0.0, 2.0 - (time.monotonic() - start)))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_receiver_is_a_named_error_on_its_senders_within_the_timeout(
    executor: str, how: str, tmp_path: Path
) -> None:
    """And what ranks shared of their memory is given back."""
    args = (_broken_receiver, 4, executor, how, str(tmp_path))
    if how == "dies":
        with pytest.raises(WorkerDied, match="rank 2"):
            run_ranks(*args, timeout_s=40)
    else:
        run_ranks(*args, timeout_s=40)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for (kind, message), seconds, num_mappings in seen:
        assert kind in ({"WorkerDied"} if how == "dies" else {"WorkerTimeout", "WorkerDied"})
        assert "rank" in message and "bucket" in message and "->" in message
        assert seconds < 5.0
        assert num_mappings == 0
    assert how == "dies" or "WorkerTimeout" in {kind for (kind, _), _, _ in seen}
