"""The layouts that a trainer can run, and their device mesh. Floor 3.

Called by the trainer, and before a run starts.

"fsdp=2"        one axis: parameters are cut over all ranks
"dp=2"          one axis: every rank has all parameters
"dp=2,fsdp=2"   two axes, outermost first: two replicas, each cut over two ranks
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardloop.errors import LayoutError
from shardloop.layout import parse_layout

AXES = ("dp", "fsdp")
ALLOWED_AXES = (("fsdp",), ("dp",), ("dp", "fsdp"))


def trainer_axes(spec: str) -> dict[str, int]:
    """Sizes of the axes dp and fsdp of a training layout string, 1 where it does not name them.

    Raises:
        LayoutError: no layout string; or one with tp, of an engine, or with fsdp outside dp, none
            of which a trainer can run.
    """
    layout = parse_layout(spec)
    if layout.scheme != "hf" or tuple(name for name, _ in layout.axes) not in ALLOWED_AXES:
        raise LayoutError(
            f"trainer.layout={spec!r} is not a training layout; choose fsdp=N (each tensor cut N "
            "ways), dp=R (R replicas) or dp=R,fsdp=N (R replicas, each cut N ways)"
        )
    return {"dp": layout.size("dp"), "fsdp": layout.size("fsdp")}


def make_mesh(spec: str, *, group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """Collective over `group`: the mesh (fsdp), or (dp, fsdp) where the layout has replicas.

    The ranks of `group` fill the mesh row by row. Sub-groups are made by their own members alone,
    so ranks outside `group` need not call.

    Raises:
        LayoutError: as `trainer_axes`; or the axes do not multiply to the number of ranks.
    """
    axes = trainer_axes(spec)
    ranks = torch.tensor(dist.get_process_group_ranks(group), dtype=torch.int)
    num_ranks = axes["dp"] * axes["fsdp"]
    if num_ranks != len(ranks):
        raise LayoutError(
            f"trainer layout {spec!r} has {num_ranks} ranks but the group has {len(ranks)}; "
            "make them equal"
        )
    if axes["dp"] == 1:
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=("fsdp",))
    grid = ranks.view(axes["dp"], axes["fsdp"])
    place = int((ranks == dist.get_rank()).nonzero())
    row, column = divmod(place, axes["fsdp"])
    groups = [_own_group(grid[:, column].tolist()), _own_group(grid[row].tolist())]
    return DeviceMesh.from_group(groups, device_type, mesh=grid, mesh_dim_names=AXES)


def _own_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True)
    return group
