"""Savers that are killed (SIGKILL): the newest checkpoint is always whole, and what was saved.

    this process ──asks──▶ fork server (has imported torch) ──fork──▶ 1 or 2 ranks that save
                                                                      step after step: killed

A tensor's elements are a function of step and rank, so a checkpoint that mixes two steps shows.
"""

import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardloop.checkpoint import Saver, latest_checkpoint, load_checkpoint
from shardloop.controller.launch import _fork_server

pytestmark = pytest.mark.slow
ROWS, WIDTH = 64, 512
NUM_KILLS = 100
NEVER = 10**9


def state_of(step: int, *, world_size: int) -> dict[str, Tensor]:
    """Collective: a tensor cut over the ranks and one that all of them have."""
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    rows = ROWS // world_size
    local = whole_of(step)["cut"][rows * dist.get_rank() :][:rows]
    return {
        "cut": DTensor.from_local(local.clone(), mesh, [Shard(0)]),
        "same": whole_of(step)["same"],
    }


def whole_of(step: int) -> dict[str, Tensor]:
    cut = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH) + step
    return {"cut": cut, "same": torch.tensor([float(step)])}


class KilledAtCall:
    """Kills its process in front of a call to the file system that has to do with `folder`."""

    def __init__(self, folder: Path, *, number: int) -> None:
        self.folder = str(folder)
        self.left = number
        fsync = os.fsync

        def counted(descriptor: int) -> None:
            self.count()
            fsync(descriptor)

        os.fsync = counted
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        is_file_event = event == "open" or event.split(".")[0] in ("os", "shutil")
        if is_file_event and any(self.folder in str(arg) for arg in args):
            self.count()

    def count(self) -> None:
        self.left -= 1
        if self.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


def save_until_killed(
    rank: int,
    world_size: int,
    store: Path,
    run: Path,
    steps: list[int],
    background: bool,
    kill_at: int,
    tell: Connection,
) -> None:
    """One rank: it tells when it begins, and each step whose save it has seen complete."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    saver = Saver(dist.group.WORLD, timeout_s=60.0)
    state = state_of(0, world_size=world_size)
    tell.send("begun")
    if kill_at < NEVER:
        KilledAtCall(run, number=kill_at)
    for step in steps:
        fresh = state_of(step, world_size=world_size)
        state["cut"].to_local().copy_(fresh["cut"].to_local())
        state["same"].copy_(fresh["same"])
        saver.save(
            run / f"step-{step:06d}",
            state,
            version=step,
            extra={"step": step},
            keep=2,
            background=background,
        )
        state["cut"].to_local().fill_(-1.0)  # training goes on
        saver.finish()
        tell.send(step)
    os._exit(0)


class Savers:
    """The ranks of one saver, which are to be killed."""

    def __init__(self, world_size: int, run: Path, steps: list[int], **options: Any) -> None:
        store = Path(tempfile.mkdtemp(dir=run.parent)) / "store"
        self.heard: list[Connection] = []
        self.processes = []
        context = _fork_server()
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            args = (rank, world_size, store, run, steps, *options.values(), theirs)
            process = context.Process(target=save_until_killed, args=args, daemon=True)
            process.start()
            theirs.close()
            self.heard.append(ours)
            self.processes.append(process)

    def wait_until_begun(self) -> None:
        for connection in self.heard:
            assert connection.recv() == "begun"

    def kill(self, order: list[int]) -> None:
        for rank in order:
            pid = self.processes[rank].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

    def last_told(self) -> int:
        """The last step whose save a rank has seen complete; waits for the end of all of them."""
        steps = [0]
        open_ends = list(self.heard)
        while open_ends:
            for connection in wait(open_ends):
                try:
                    message = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    open_ends.remove(connection)  # type: ignore[arg-type]
                else:
                    steps += [message] if message != "begun" else []
        for process in self.processes:
            process.join()
        return max(steps)


def newest_step(run: Path, group: dist.ProcessGroup) -> int:
    """Of the newest checkpoint, which has been loaded and compared; 0: there is none."""
    newest = latest_checkpoint(run)
    if newest is None:
        return 0
    step = int(newest.name.removeprefix("step-").removesuffix(".old"))
    loaded = {key: torch.zeros_like(value) for key, value in whole_of(step).items()}
    restored = load_checkpoint(newest, loaded, group=group)
    assert (restored.version, restored.extra) == (step, {"step": step})
    assert all(torch.equal(loaded[key], value) for key, value in whole_of(step).items())
    return step


@pytest.mark.timeout(600)
@pytest.mark.parametrize("background", [False, True])
def test_after_a_kill_at_any_time_the_newest_checkpoint_is_whole(
    background: bool, tmp_path, group, seed
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    draw = random.Random(seed)
    options = {"background": background, "kill_at": NEVER}
    timed = Savers(1, run, [1, 2, 3, 4], **options)
    timed.wait_until_begun()
    began = time.perf_counter()
    assert timed.last_told() == 4
    longest_s = time.perf_counter() - began
    newest, progress = 4, 0
    for number in range(NUM_KILLS // 2):
        world_size = 2 if number % 5 == 0 else 1
        steps = list(range(newest + 1, newest + 200))
        savers = Savers(world_size, run, steps, **options)
        savers.wait_until_begun()
        time.sleep(draw.uniform(0.0, longest_s))
        savers.kill(draw.sample(range(world_size), world_size))
        told = savers.last_told()
        found = newest_step(run, group)
        assert found >= max(told, newest), "a save that was told complete is not there"
        progress += found - newest
        newest = found
    assert progress > NUM_KILLS // 10, "the kills came before there was anything to spoil"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("steps", [[3], [2]], ids=["a new step", "the newest step again"])
def test_after_a_kill_in_front_of_any_call_to_the_file_system_one_is_whole(
    background: bool, steps: list[int], tmp_path, group
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    plain = Savers(1, run, [1, 2], background=False, kill_at=NEVER)
    assert plain.last_told() == 2
    found = []
    for kill_at in range(1, 200):
        told = Savers(1, run, steps, background=background, kill_at=kill_at).last_told()
        found.append(newest_step(run, group))
        assert found[-1] >= max(2, told)
        if told:
            break
        if found[-1] == 3:  # as it was before, for the next kill
            assert Savers(1, run, [2], background=False, kill_at=NEVER).last_told() == 2
            for path in run.glob("*3*"):
                path.rename(tmp_path / f"{path.name}-{kill_at}")
    assert 15 < kill_at < 199
    assert found == sorted(found)
