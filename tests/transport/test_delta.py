"""Laws of updates by delta between real ranks: what p2p gives, in the bytes of the deltas."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.delta.codec import encode
from shardloop.parallel.context import RankContext
from shardloop.reshard.cost import cost
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import Proof, verify
from shardloop.transport import delta
from shardloop.transport.buckets import make_share, pack
from shardloop.transport.delta import CLAIM_BYTES, DeltaTransport
from shardloop.transport.p2p import execute_p2p
from tests.harness import run_ranks
from tests.transport.live import assert_same, cut, empty, error_of, layouts, random_state

BF16 = torch.bfloat16
CASES: list[tuple[str, str, list[int], list[int]]] = [
    ("fsdp=2", "engine:tp=2", [0, 1], [2, 3]),
    ("fsdp=3", "engine:tp=2", [0, 1, 2], [3, 4]),
    ("fsdp=4", "engine:tp=2", [0, 1, 2, 3], [3, 4]),
    ("dp=2,fsdp=2", "engine:tp=1", [4, 3, 1, 0], [2]),
]
"""Uneven shards, repeated kv heads, replicas, a rank with both roles."""


def _proof(case: tuple[str, str, list[int], list[int]]) -> Proof:
    src_spec, dst_spec, src_ranks, dst_ranks = case
    src, dst = layouts(src_spec, dst_spec)
    return verify(plan_reshard(src, dst, src_ranks=src_ranks, dst_ranks=dst_ranks))


def _states(proof: Proof, num_versions: int) -> list[dict[str, Tensor]]:
    """Canonical weights of versions in a row: each changes about 2 % of the elements a little."""
    states = [random_state(proof.plan.src.model)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_versions - 1):
        states.append(
            {
                name: tensor * (1 + 0.02 * (torch.rand(tensor.shape, generator=generator) < 0.02))
                for name, tensor in states[-1].items()
            }
        )
    return states


class Rank:
    """One rank's source tensors of any version, and its destination tensors."""

    def __init__(self, proof: Proof, rank: int) -> None:
        plan = proof.plan
        self.plan = plan
        self.src_place = plan.src_ranks.index(rank) if rank in plan.src_ranks else None
        self.dst_place = plan.dst_ranks.index(rank) if rank in plan.dst_ranks else None
        self.dst = None
        if self.dst_place is not None:
            self.dst = empty(plan.dst, self.dst_place, dtype=BF16)

    def src(self, state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        if self.src_place is None:
            return None
        return cut(self.plan.src, self.src_place, state, dtype=torch.float32)

    def assert_holds(self, state: Mapping[str, Tensor]) -> None:
        if self.dst is not None and self.dst_place is not None:
            rounded = {name: tensor.to(BF16) for name, tensor in state.items()}
            assert_same(self.dst, cut(self.plan.dst, self.dst_place, rounded, dtype=BF16))


def _encoded_bytes(proof: Proof, rank: int, old: Any, new: Any, bucket_bytes: int) -> int:
    """What the deltas of this rank's buckets take, and its claims, encoded on their own."""
    share = make_share(proof.plan, rank, dtype=BF16, bucket_bytes=bucket_bytes)
    total = CLAIM_BYTES * len(share.receives)
    for bucket in share.sends:
        packed = []
        for tensors in (old, new):
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8)
            pack(bucket.of(tensors), buffer, BF16)
            packed.append(buffer.view(BF16))
        total += encode(*packed).num_bytes
    return total


def _updates(context: RankContext) -> list[list[tuple[int, int, float, int]]]:
    """Per case and bucket size: bytes sent first and then, density, copy kept."""
    results = []
    for case in CASES:
        proof, moved = _proof(case), []
        states = _states(proof, 3)
        for bucket_bytes in (600, 2**20):
            here = Rank(proof, context.rank)
            settings: Any = {"dtype": BF16, "group": dist.group.WORLD, "bucket_bytes": bucket_bytes}
            transport = DeltaTransport(proof, **settings)
            first = transport.move(here.src(states[0]), here.dst)
            here.assert_holds(states[0])
            for old, new in pairwise(states):
                report = transport.move(here.src(new), here.dst)
                here.assert_holds(new)
                expected = _encoded_bytes(
                    proof, context.rank, here.src(old), here.src(new), bucket_bytes
                )
                assert report.bytes_sent == expected
                assert report.num_dense == 0
            by_delta = here.dst and {name: tensor.clone() for name, tensor in here.dst.items()}
            execute_p2p(proof, src=here.src(new), dst=here.dst, **settings)
            if here.dst is not None:
                assert_same(here.dst, by_delta)
            share = report.num_sent / max(1, report.num_sent + report.num_left_out)
            moved.append((first.bytes_sent, report.bytes_sent, share, report.kept_bytes))
            transport.close()
        results.append(moved)
    return results


def test_updates_by_delta_equal_p2p_and_send_the_bytes_of_the_deltas() -> None:
    by_rank = run_ranks(_updates, 5, timeout_s=120)
    for index, case in enumerate(CASES):
        plan = _proof(case).plan
        minimum = cost(plan, itemsize=2).minimum_bytes
        for size in (0, 1):
            rows = [by_rank[rank][index][size] for rank in range(5)]
            first, then, kept = (sum(row[column] for row in rows) for column in (0, 1, 3))
            assert kept == minimum
            assert minimum < first <= minimum * 1.2
            assert then < minimum * (0.25 if size == 0 else 0.1), "little was saved"
            assert all((0.005 < row[2] < 0.05) == (row[3] > 0) for row in rows)


def _losses(context: RankContext) -> list[Any]:
    """What goes wrong at rank 2, and the update after it."""
    proof = _proof(CASES[0])
    states = _states(proof, 6)
    here = Rank(proof, context.rank)
    transport = DeltaTransport(proof, dtype=BF16, group=dist.group.WORLD, bucket_bytes=2000)
    transport.move(here.src(states[0]), here.dst)
    seen: list[Any] = []
    if context.rank == 2:  # an engine that gave its memory up
        for tensor in here.dst.values():
            tensor.fill_(float("nan"))
    seen.append(transport.move(here.src(states[1]), here.dst).num_dense)
    here.assert_holds(states[1])

    plain, count = delta.from_wire, 0

    def from_wire(header: Tensor, payload: Tensor, *, dtype: torch.dtype) -> Any:
        nonlocal count
        count += 1
        if context.rank == 2 and count == 2:
            payload[0] ^= 4
        return plain(header, payload, dtype=dtype)

    delta.from_wire = from_wire
    seen.append(error_of(lambda: transport.move(here.src(states[2]), here.dst)))
    delta.from_wire = plain
    if context.rank == 3:
        here.assert_holds(states[2])
    seen.append(transport.move(here.src(states[3]), here.dst).num_dense)
    here.assert_holds(states[3])

    if context.rank == 2:  # an element was written by someone else
        here.dst["model.norm.weight"][3] += 1
    seen.append(transport.move(here.src(states[4]), here.dst).num_dense)
    here.assert_holds(states[4])
    seen.append(transport.move(here.src(states[5]), here.dst).num_dense)
    here.assert_holds(states[5])
    return seen


def test_what_the_receiver_no_longer_holds_is_sent_whole_and_nothing_else() -> None:
    by_rank = run_ranks(_losses, 4, timeout_s=60)
    nan, damaged, mended, touched, quiet = zip(*by_rank, strict=True)
    plan = _proof(CASES[0]).plan
    buckets = [
        [b.dst_rank for b in make_share(plan, rank, dtype=BF16, bucket_bytes=2000).sends]
        for rank in (0, 1)
    ]
    assert nan == (buckets[0].count(2), buckets[1].count(2), 0, 0)
    for rank in range(4):
        kind, message = damaged[rank]
        assert kind == ("FingerprintError" if rank == 2 else "OtherRankRefused")
        assert ("bucket 2 " in message and "damaged" in message) == (rank == 2)
        assert ("ranks [2] refused" in message) == (rank != 2)
    assert sum(mended) == 1, "the one damaged bucket"
    assert sum(touched) == 1, "the one bucket of the element"
    assert sum(quiet) == 0
