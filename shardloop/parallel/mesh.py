"""The layouts that a trainer can run, and their device mesh. Floor 3.

Called by the trainer, and before a run starts.

    dp=2,fsdp=2,tp=2   replicas, outermost; each cut over the rows of its tensors; innermost, each
                       part cut by heads, width and vocabulary

An axis that is left out has size 1. Ranks that differ in tp alone take the same rows of a batch.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardloop.errors import LayoutError
from shardloop.families import CanonicalModel
from shardloop.layout import parse_layout

AXES = ("dp", "fsdp", "tp")


def trainer_axes(spec: str) -> dict[str, int]:
    """Sizes of the axes dp, fsdp and tp of a training layout string, 1 where it does not name them.

    Raises:
        LayoutError: no layout string; or one of an engine, or with its axes in another order.
    """
    layout = parse_layout(spec)
    names = [name for name, _ in layout.axes]
    if layout.scheme != "hf" or names != [axis for axis in AXES if axis in names]:
        raise LayoutError(
            f"trainer.layout={spec!r} is not a training layout; name some of dp=R (R replicas), "
            "fsdp=F (each tensor cut F ways) and tp=T (each layer cut T ways) in this order, such "
            "as fsdp=2 or dp=2,fsdp=2,tp=2"
        )
    return {axis: layout.size(axis) for axis in AXES}


def check_tensor_parallel(model: CanonicalModel, tp: int) -> None:
    """
    Raises:
        LayoutError: tp does not give every rank whole heads and an equal part of the width. Unlike
            an engine, a trainer holds no kv head twice: its gradient would need adding up.
    """
    sizes = {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "intermediate_size": model.intermediate_size,
    }
    faults = [f"{name}={size}" for name, size in sizes.items() if size % tp]
    if faults:
        allowed = [
            str(n)
            for n in range(1, model.num_kv_heads + 1)
            if not any(size % n for size in sizes.values())
        ]
        raise LayoutError(
            f"trainer.layout: tp={tp} does not divide {', '.join(faults)}; choose tp from "
            f"{', '.join(allowed)}"
        )


def make_mesh(
    spec: str, *, group: dist.ProcessGroup, device_type: str, timeout_s: float
) -> DeviceMesh:
    """Collective over `group`: a mesh with the axis fsdp, and with dp and tp where above 1.

    The ranks of `group` fill the mesh, its last axis fastest. Sub-groups are made by their own
    members alone, so ranks outside `group` need not call.

    Args:
        timeout_s: how long a rank waits for others in a collective over one axis.
    Raises:
        LayoutError: as `trainer_axes`; or the axes do not multiply to the number of ranks.
    """
    axes = trainer_axes(spec)
    ranks = torch.tensor(dist.get_process_group_ranks(group), dtype=torch.int)
    num_ranks = axes["dp"] * axes["fsdp"] * axes["tp"]
    if num_ranks != len(ranks):
        raise LayoutError(
            f"trainer layout {spec!r} has {num_ranks} ranks but the group has {len(ranks)}; "
            "make them equal"
        )
    names = tuple(axis for axis in AXES if axis == "fsdp" or axes[axis] > 1)
    if len(names) == 1:
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=names)
    grid = ranks.view([axes[name] for name in names])
    place = (grid == dist.get_rank()).nonzero()[0].tolist()
    timeout = timedelta(seconds=timeout_s)
    _equalise_group_counts(group, timeout=timeout)
    groups = []
    for dim in range(len(names)):
        index = [slice(None) if d == dim else place[d] for d in range(len(names))]
        groups.append(_own_group(grid[tuple(index)].tolist(), timeout=timeout))
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=names)


def _equalise_group_counts(group: dist.ProcessGroup, *, timeout: timedelta) -> None:
    """Collective over `group`: its ranks are members of equally many groups afterwards.

    Torch names a group that its members make alone by how many they are in already. Where some
    ranks have a further role these numbers differ, and the members would wait for each other under
    different names; so the others join groups of their own until they are in as many.
    """
    count = len(dist.distributed_c10d._world.pg_names)
    most = torch.tensor(count)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    for _ in range(int(most) - count):
        _own_group([dist.get_rank()], timeout=timeout)


def _own_group(
    ranks: Sequence[int], *, timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True
    )
    return group


def twin_group(group: dist.ProcessGroup, *, timeout_s: float) -> dist.ProcessGroup:
    """Collective over `group`: a second group of the same ranks, in CPU memory, for the messages of
    another thread. Ranks outside `group` need not call."""
    timeout = timedelta(seconds=timeout_s)
    _equalise_group_counts(group, timeout=timeout)
    return _own_group(dist.get_process_group_ranks(group), timeout=timeout, backend="gloo")


def data_place(mesh: DeviceMesh) -> tuple[int, int]:
    """Which share of a batch's rows this rank takes, and how many shares there are."""
    place, count = 0, 1
    for axis in ("dp", "fsdp"):
        if axis in axis_names(mesh):
            place = place * mesh[axis].size() + mesh[axis].get_local_rank()
            count *= mesh[axis].size()
    return place, count


def tp_place(mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's coordinate on the axis tp, and the axis's size."""
    if "tp" not in axis_names(mesh):
        return 0, 1
    return mesh["tp"].get_local_rank(), mesh["tp"].size()


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names
