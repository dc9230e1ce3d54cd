"""Laws of shared memory: nothing is overwritten unread, nothing is left behind, nothing grows."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardloop.errors import WorkerDied, WorkerTimeout
from shardloop.parallel.context import RankContext
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import verify
from shardloop.transport import shm
from shardloop.transport.base import Transport
from shardloop.transport.channel import Channel, Listener
from shardloop.transport.delta import DeltaTransport
from shardloop.transport.gather import Gather
from shardloop.transport.p2p import P2P
from shardloop.transport.segment import make_segment, open_segment
from shardloop.transport.shm import Shm
from tests.harness import run_ranks
from tests.transport.live import assert_same, cut, empty, error_of, layouts, random_state
from tests.transport.live import shared_mappings as mapped

BF16 = torch.bfloat16
BUCKET = 500


def _sides(rank: int) -> tuple[Any, Any, Any]:
    """A proof 2 -> 2, and this rank's source and destination tensors."""
    src, dst = layouts("fsdp=2", "engine:tp=2")
    proof = verify(plan_reshard(src, dst))
    if rank < 2:
        return proof, cut(src, rank, random_state(src.model), dtype=torch.float32), None
    return proof, None, empty(dst, rank - 2, dtype=BF16)


def _slow_readers(context: RankContext) -> None:
    proof, src, dst = _sides(context.rank)
    plain = shm.unpack

    def unpack(*args: Any) -> None:
        time.sleep(0.001)
        plain(*args)

    shm.unpack = unpack
    transport = Shm(proof, dtype=BF16, group=dist.group.WORLD, bucket_bytes=BUCKET)
    transport.move(src, dst)
    transport.close()
    if dst is not None:
        layout = proof.plan.dst
        assert_same(dst, cut(layout, context.rank - 2, random_state(layout.model), dtype=BF16))


def test_a_slot_is_overwritten_only_after_its_reader_has_acknowledged() -> None:
    run_ranks(_slow_readers, 4, timeout_s=60)


def _hundred_updates(context: RankContext) -> list[Any]:
    """Of each transport: (open files, mappings, resident kB) after 5 and after 105 updates."""
    proof, src, dst = _sides(context.rank)
    seen: list[Any] = []
    settings: Any = {"dtype": BF16, "group": dist.group.WORLD}
    for make in (P2P, Shm, DeltaTransport, Gather):
        limit = {} if make is Gather else {"bucket_bytes": 4096}
        transport: Transport = make(proof, **settings, **limit)
        for count in (5, 100):
            for _ in range(count):
                transport.move(src, dst)
            dist.barrier()
            seen.append((len(os.listdir("/proc/self/fd")), mapped(), _resident_kb()))
        dist.barrier()
        transport.close()
        transport.close()
        seen.append(mapped())
        if make is Shm:
            closed = error_of(lambda t=transport: t.move(src, dst))
    return [*seen, closed]


def test_memory_and_files_are_flat_over_a_hundred_updates_and_gone_when_closed() -> None:
    named = set(os.listdir("/dev/shm"))
    by_rank = run_ranks(_hundred_updates, 4, timeout_s=60)
    for rank, seen in enumerate(by_rank):
        assert [*seen[2:12:3]] == [0] * 4
        assert seen[3][1] == (4 if rank >= 2 else 2), "a file and a mapping for each segment"
        for before, after in (seen[i : i + 2] for i in range(0, 12, 3)):
            assert before[:2] == after[:2]
            assert after[2] - before[2] < 2048
        assert seen[12][0] == "WorkerDied" and "was closed" in seen[12][1]
    assert set(os.listdir("/dev/shm")) <= named, "nothing has a name that could be left behind"


def _resident_kb() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def test_both_ends_of_a_segment_are_one_memory_and_it_ends_with_them() -> None:
    made = make_segment(64, device=torch.device("cpu"))
    assert made.descriptor is not None and made.memory is not None
    opened = open_segment(os.dup(made.descriptor), None)
    made.memory[3] = 7
    assert opened.memory is not None and opened.memory[3] == 7
    made.close()
    assert opened.memory[3] == 7 and mapped() > 0
    opened.close()
    assert mapped() == 0


def _gpu_slots(context: RankContext) -> None:
    proof, src, dst = _sides(context.rank)
    device = torch.device("cuda", 0)
    src, dst = [t and {name: v.to(device) for name, v in t.items()} for t in (src, dst)]
    group = dist.group.WORLD
    transport = Shm(proof, dtype=BF16, group=group, bucket_bytes=4096, device=device)
    for _ in range(2):
        transport.move(src, dst)
    dist.barrier()
    transport.close()
    if dst is not None:
        layout = proof.plan.dst
        found = {name: tensor.cpu() for name, tensor in dst.items()}
        assert_same(found, cut(layout, context.rank - 2, random_state(layout.model), dtype=BF16))


@pytest.mark.gpu
def test_ranks_that_share_a_gpu_hand_slots_of_its_memory_over() -> None:
    run_ranks(_gpu_slots, 4, timeout_s=120)


def test_a_line_says_who_is_gone_silent_or_elsewhere() -> None:
    listener = Listener(backlog=1, timeout_s=0.05)
    with pytest.raises(WorkerTimeout, match="no other rank opened a line"):
        listener.accept()
    here = Channel.connect(listener.address, timeout_s=0.05)
    there = listener.accept()
    here.put(5, what="a number")
    assert there.get(what="a number") == 5
    with pytest.raises(WorkerTimeout, match=r"bucket 3: no answer within 0.05 s"):
        there.get(what="bucket 3")
    here.close()
    with pytest.raises(WorkerDied, match="bucket 3: a rank has died or given up"):
        there.get(what="bucket 3")
    there.close()
    address = listener.address
    listener.close()
    with pytest.raises(WorkerDied, match="choose the transport p2p between hosts"):
        Channel.connect(address, timeout_s=0.05)
