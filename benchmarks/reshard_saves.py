"""What a rank does in the measurement of checkpoints. Called by `benchmarks.reshard_checkpoint`.

The state is float32 weights with two moments each, cut along the first dim. A step of training is
stood in for by matrix products and one small sum over ranks, the same number each time.
"""

import logging
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.reshard_ranks import Moments, alternate
from shardloop.checkpoint import Saver, load_checkpoint
from shardloop.parallel.context import RankContext

STEPS = 5
OURS, DCP, DCP_ASYNC = "step-000001", "dcp", "dcp-async"
State = dict[str, DTensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSize:
    num_weights: int
    """Square matrices, each with two moments."""
    width: int
    products: int
    """Matrix products of one step of training."""

    @property
    def num_bytes(self) -> int:
        return 3 * self.num_weights * self.width**2 * torch.float32.itemsize


def make_state(context: RankContext, size: StateSize) -> State:
    """Equal numbers whatever the number of ranks."""
    mesh = DeviceMesh.from_group(context.group("all"), "cpu", mesh_dim_names=("fsdp",))
    state, shape = {}, torch.Size((size.width, size.width))
    for number in range(3 * size.num_weights):
        generator = torch.Generator().manual_seed(number)
        whole = torch.empty(shape).normal_(generator=generator)
        parts = whole.chunk(context.world_size)
        local = parts[context.rank].clone()
        state[f"{('weight', 'm', 'v')[number % 3]}.{number // 3}"] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=shape, stride=whole.stride()
        )
    return state


def compare_saves(
    context: RankContext, size: StateSize, rounds: int, folder: Path, timeout_s: float
) -> Moments:
    """Collective over all ranks: each way's files hold the state to the bit; then the times."""
    _silence()
    state, group = make_state(context, size), dist.group.WORLD
    saver = Saver(group, timeout_s=timeout_s)
    threads_group = dist.new_group()  # DCP's thread must not meet the messages of the steps
    copies = [torch.empty_like(tensor.to_local()) for tensor in state.values()]
    step = _training(size)
    pending: list[Future[Any]] = []

    def copy() -> None:
        for target, tensor in zip(copies, state.values(), strict=True):
            target.copy_(tensor.to_local())

    def ours(*, background: bool) -> None:
        path = folder / OURS
        saver.save(path, state, version=1, extra={}, keep=None, background=background)

    def dcp_sync() -> None:
        dcp.save(state, storage_writer=_writer(folder / DCP), process_group=group)

    def dcp_async() -> None:
        writer = _writer(folder / DCP_ASYNC)
        pending.append(dcp.async_save(state, storage_writer=writer, process_group=threads_group))

    def gathered() -> None:
        whole = {name: tensor.full_tensor() for name, tensor in state.items()}
        if context.rank == 0:
            torch.save(whole, folder / "gathered.pt")

    arms: dict[str, Callable[[], object]] = {
        "copy of the shard": copy,
        "steps alone": step,
        "ours, background: stall": lambda: ours(background=True),
        "ours, background: steps": step,
        "ours, background: end": saver.finish,
        "ours, at once": lambda: (ours(background=False), saver.finish()),
        "dcp.save": dcp_sync,
        "dcp.async_save: stall": dcp_async,
        "dcp.async_save: steps": step,
        "dcp.async_save: end": lambda: pending.pop().result(),
        "gather + torch.save": gathered,
    }
    for arm in arms.values():
        dist.barrier()
        arm()
    dist.barrier()
    for name in (OURS, DCP, DCP_ASYNC):
        _require_equal(_load(folder / name, state), state, name)
    if context.rank == 0:
        whole = torch.load(folder / "gathered.pt")
    full = {name: tensor.full_tensor() for name, tensor in state.items()}
    if context.rank == 0 and not all(torch.equal(whole[name], full[name]) for name in full):
        raise AssertionError("gathered.pt holds another state")
    return alternate(arms, rounds, rotate=False)


def compare_loads(
    context: RankContext, size: StateSize, rounds: int, folder: Path
) -> dict[str, Any]:
    """Collective over all ranks, of another number than saved: times, and bytes read."""
    _silence()
    state = make_state(context, size)
    needed = sum(tensor.to_local().nbytes for tensor in state.values())
    target = _poisoned(state)
    group = dist.group.WORLD
    arms = {
        "ours": lambda: load_checkpoint(folder / OURS, target, group=group),
        "dcp.load": lambda: dcp.load(target, checkpoint_id=folder / DCP, process_group=group),
    }
    num_read = {}
    for name, arm in arms.items():
        for tensor in target.values():
            tensor.to_local().fill_(torch.nan)
        before = _bytes_read()
        arm()
        num_read[name] = _bytes_read() - before
        _require_equal(target, state, name)
    return {"needed": needed, "read": num_read, "moments": alternate(arms, rounds)}


def _silence() -> None:
    warnings.filterwarnings("ignore")  # DCP's, of each folder that it overwrites
    logging.getLogger("torch").setLevel(logging.ERROR)


def _writer(path: Path) -> FileSystemWriter:
    return FileSystemWriter(path, overwrite=True)


def _training(size: StateSize) -> Callable[[], None]:
    left, right = torch.randn(256, 256), torch.randn(256, 256)
    out, total = torch.empty(256, 256), torch.ones(1)

    def steps() -> None:
        for _ in range(STEPS):
            for _ in range(size.products):
                torch.mm(left, right, out=out)
            dist.all_reduce(total)
            total.fill_(1)

    return steps


def _poisoned(state: State) -> State:
    return {
        name: DTensor.from_local(
            torch.full_like(tensor.to_local(), torch.nan), tensor.device_mesh, tensor.placements,
            run_check=False, shape=tensor.shape, stride=tensor.stride(),
        )
        for name, tensor in state.items()
    }  # fmt: skip


def _load(path: Path, state: State) -> State:
    target = _poisoned(state)
    dcp.load(target, checkpoint_id=path, process_group=dist.group.WORLD)
    return target


def _require_equal(found: State, state: State, what: str) -> None:
    for name, tensor in state.items():
        if not torch.equal(found[name].to_local(), tensor.to_local()):
            raise AssertionError(f"{what}: {name} comes back as something else")


def _bytes_read() -> int:
    """By read calls of this process so far, from wherever."""
    for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "rchar":
            return int(value)
    raise OSError("/proc/self/io has no rchar")
