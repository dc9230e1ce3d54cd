"""Laws of lost peers: whatever way weights travel and whenever a rank is lost, all others are told.

The ranks here are processes of their own, whom nobody ends when one of them fails.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from shardloop.config import TransportName
from shardloop.controller.launch import PRELOAD
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import verify
from shardloop.transport import delta, gather, p2p, shm
from shardloop.transport.relay import plan_relay
from shardloop.weight_sync import WeightSync
from tests.transport.live import error_of, layouts, shared_mappings
from tests.transport.test_weight_sync import ShardedEngine, ShardedTrainer

WORLD = 5
VICTIM, BYSTANDER = 2, 4
"""An engine rank, which in the relay passes on to rank 3; and a rank that owns nothing."""
TIMEOUT_S = 5.0
GROUP_TIMEOUT_S = 300.0
"""Longer than any rank is waited for here: an error in time is not the group's."""
WAIT_S = 60.0
STEP = {
    "p2p": (p2p, "unpack"),
    "shm": (shm, "unpack"),
    "delta": (delta, "apply"),
    "relay": (p2p, "unpack"),
    "gather": (gather, "_cut"),
}
"""What an engine rank does with each bucket or tensor that came."""


def _sync(rank: int, transport: TransportName) -> WeightSync:
    src, replica = layouts("fsdp=2", "engine:tp=1")
    trainer = ShardedTrainer(src, rank) if rank < 2 else None
    engine = ShardedEngine(replica, 0) if rank in (2, 3) else None
    proof: Any = plan_relay(src, replica, src_ranks=[0, 1], replica_ranks=[[2], [3]])
    if transport != "relay":
        dst = layouts("fsdp=2", "engine:replicas=2,tp=1")[1]
        proof = verify(plan_reshard(src, dst, src_ranks=[0, 1], dst_ranks=[2, 3]))
    settings: Any = {"group": dist.group.WORLD, "dtype": torch.bfloat16, "bucket_bytes": 200}
    settings |= {"transport": transport, "timeout_s": TIMEOUT_S}
    return WeightSync(trainer, engine, proof=proof, **settings)


def _vanish(how: str) -> None:
    """Die, or stand still with all threads for longer than any wait."""
    if how == "dies":
        os._exit(9)
    wake = f"sleep {8 * TIMEOUT_S}; kill -CONT {os.getpid()} 2>/dev/null"
    subprocess.Popen(["sh", "-c", wake], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _rank(rank: int, folder: str, transport: TransportName, when: str, how: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    if rank == VICTIM and when == "set-up":
        dist.barrier()
        _vanish(how)
    sync = None
    if when != "set-up":
        sync = _sync(rank, transport)
        sync.sync(1)
    dist.barrier()
    if sync is None:
        error = error_of(lambda: _sync(rank, transport))
    else:
        if rank == VICTIM:
            _prepare(sync, transport, when, how)
        error = error_of(lambda: sync.sync(1))
        sync.close()
    seen = [error, shared_mappings()]
    Path(folder, f"{rank}.json").write_text(json.dumps(seen))
    time.sleep(4 * TIMEOUT_S)  # a rank that leaves would tell its peers more than a rank that waits
    os._exit(0)


def _prepare(sync: WeightSync, transport: str, when: str, how: str) -> None:
    """The next update loses this rank before it, within it, or after all has arrived."""
    if when == "before":
        _vanish(how)
    module, name = STEP[transport]
    plain, count = getattr(module, name), 0

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            _vanish(how)
        return plain(*args, **kwargs)

    if when == "within":
        setattr(module, name, step)
    if when == "after":
        sync._check_weights = lambda *_: _vanish(how)  # type: ignore[assignment]


@contextmanager
def _processes(*args: Any) -> Iterator[None]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    ranks = [context.Process(target=_rank, args=(rank, *args)) for rank in range(WORLD)]
    for rank in ranks:
        rank.start()
    try:
        yield
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


TRANSPORTS = pytest.mark.parametrize("transport", get_args(TransportName)[::-1])
OTHER_MOMENTS = ["set-up", "before", "after"]


@TRANSPORTS
@pytest.mark.parametrize(
    "when", ["within", *(pytest.param(when, marks=pytest.mark.slow) for when in OTHER_MOMENTS)]
)
def test_a_dead_rank_is_a_named_error_on_all_others(
    transport: TransportName, when: str, tmp_path: Path
) -> None:
    _check_others(str(tmp_path), transport, when, "dies")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["within", *OTHER_MOMENTS])
@TRANSPORTS
def test_a_rank_that_stands_still_is_a_named_error_on_all_others(
    transport: TransportName, when: str, tmp_path: Path
) -> None:
    _check_others(str(tmp_path), transport, when, "stops")


def _check_others(folder: str, transport: TransportName, when: str, how: str) -> None:
    found = {rank: Path(folder, f"{rank}.json") for rank in range(WORLD) if rank != VICTIM}
    with _processes(folder, transport, when, how):
        end = time.monotonic() + WAIT_S
        while not all(file.exists() for file in found.values()):
            assert time.monotonic() < end, [rank for rank, file in found.items() if file.exists()]
            time.sleep(0.02)
        time.sleep(0.05)  # until the last is written
    for rank, file in found.items():
        error, num_mappings = json.loads(file.read_text())
        assert error is not None, f"rank {rank} noticed nothing"
        assert error[0] in ("WorkerDied", "WorkerTimeout"), (rank, error)
        assert num_mappings == 0
