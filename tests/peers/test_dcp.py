"""Resharding by torch itself, on live ranks: a DCP checkpoint loaded in another layout, and
`DTensor.redistribute`. Both must leave on each rank what a proved plan puts there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from shardloop.layout import make_layout
from shardloop.parallel.context import RankContext
from shardloop.reshard.inprocess import execute_inprocess
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import verify
from tests.harness import run_ranks
from tests.layout.reference import expected_local, labels
from tests.layout.test_observed import COLUMNS, ROWS, live, model

pytestmark = [pytest.mark.optional, pytest.mark.filterwarnings("ignore")]

SAVED = ("fsdp=4", "fsdp=2,tp=2", "dp=2,fsdp=2", "tp=4")
LOADED = {4: SAVED, 2: ("fsdp=2", "tp=2")}
MOVED = (("fsdp=4", "tp=4"), ("tp=4", "fsdp=4"))
Held = dict[str, np.ndarray[Any, Any]]


def whole() -> dict[str, Tensor]:
    return {name: torch.tensor(x, dtype=torch.float32) for name, x in labels(model()).items()}


def placed(spec: str, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`full` as tensor parallelism and FSDP2 hold it on this rank."""
    state = live(spec)
    for name, tensor in state.items():
        assert isinstance(tensor, DTensor)
        tensor.copy_(
            distribute_tensor(full[name], tensor.device_mesh, tensor.placements, src_data_rank=None)
        )
    return state


def held(state: Mapping[str, Tensor]) -> Held:
    """Copies of this rank's parts."""
    parts = {n: t.to_local() if isinstance(t, DTensor) else t for n, t in state.items()}
    return {name: part.detach().clone().numpy() for name, part in parts.items()}


def save_and_load(context: RankContext, folder: Path) -> dict[tuple[str, str], Held]:
    """By layout saved in and loaded in; 4 ranks save, any number may load."""
    found = {}
    if context.world_size == 4:
        for spec in SAVED:
            dcp.save(placed(spec, whole()), checkpoint_id=str(folder / spec))
    for src in SAVED:
        for dst in LOADED[context.world_size]:
            state = live(dst)
            dcp.load(state, checkpoint_id=str(folder / src))
            found[src, dst] = held(state)
    dist.barrier()
    return found


def redistribute(context: RankContext) -> dict[tuple[str, str], Held]:
    mesh = init_device_mesh("cpu", (context.world_size,))
    found = {}
    for src, dst in MOVED:
        state = {}
        for name, tensor in whole().items():
            start, end = placement(src, name), placement(dst, name)
            there = distribute_tensor(tensor, mesh, [start], src_data_rank=None)
            state[name] = there.redistribute(placements=[end])
        found[src, dst] = held(state)
    return found


def placement(spec: str, name: str) -> Placement:
    if spec.startswith("fsdp") or any(stem in name for stem in ROWS):
        return Shard(0)
    return Shard(1) if any(stem in name for stem in COLUMNS) else Replicate()


def planned(src: str, dst: str) -> dict[int, Held]:
    """What our plan leaves on each rank, both layouts beginning at rank 0."""
    full = labels(model())
    a, b = make_layout(model(), src), make_layout(model(), dst)
    plan = plan_reshard(a, b, dst_ranks=range(b.world_size))
    have = {rank: expected_local(model(), src, rank, full) for rank in plan.src_ranks}
    want = {
        rank: {name: np.zeros(shape) for name, shape in b.local_shapes(rank).items()}
        for rank in plan.dst_ranks
    }
    execute_inprocess(verify(plan), have, want)
    return want


def assert_planned(by_rank: list[dict[tuple[str, str], Held]]) -> None:
    for pair in by_rank[0]:
        ours = planned(*pair)
        for rank, found in enumerate(by_rank):
            assert found[pair].keys() == ours[rank].keys()
            for name, part in found[pair].items():
                np.testing.assert_array_equal(part, ours[rank][name], err_msg=f"{pair} {name}")


def test_a_checkpoint_loaded_in_another_layout_is_what_a_plan_delivers(tmp_path: Path) -> None:
    assert_planned(run_ranks(save_and_load, 4, tmp_path, timeout_s=150))
    assert_planned(run_ranks(save_and_load, 2, tmp_path, timeout_s=150))


def test_redistribute_is_what_a_plan_delivers() -> None:
    assert_planned(run_ranks(redistribute, 4, timeout_s=150))
