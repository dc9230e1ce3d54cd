"""The layout of live tensors, read from their placements. Floor 3.

Called by tests and by whoever holds a state dict of DTensors from elsewhere.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from shardloop.errors import LayoutError
from shardloop.families import CanonicalModel
from shardloop.layout import Layout
from shardloop.layout.observed import Placed, Shard, layout_of_placements


def layout_of_state_dict(model: CanonicalModel, state: Mapping[str, Tensor]) -> Layout:
    """What every rank holds of a model, from one rank's DTensors; no rank talks to another.

    Args:
        state: by Hugging Face name; tensors that are no DTensors are whole on every rank.
    Raises:
        LayoutError: as `layout_of_placements`; or a tensor is a partial sum, is placed in a way
            that is not known, or its mesh is not ranks 0 to W-1 in order.
    """
    meshes = [t.device_mesh for t in state.values() if isinstance(t, DTensor)]
    everywhere = _axes(meshes[0]) if meshes else (("dp", 1),)
    faults, placed = [], {}
    for name, tensor in state.items():
        if not isinstance(tensor, DTensor):
            nowhere = (None,) * len(everywhere)
            placed[name] = Placed(tuple(tensor.shape), everywhere, nowhere)
            continue
        try:
            placed[name] = _placed(tensor)
        except LayoutError as error:
            faults.append(f"{name} {error}")
    if faults:
        raise LayoutError("; ".join(faults))
    return layout_of_placements(model, placed)


def _placed(tensor: DTensor) -> Placed:
    mesh = tensor.device_mesh
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(len(ranks))):
        raise LayoutError(f"lies on ranks {ranks}; they must be 0 to {len(ranks) - 1} in order")
    return Placed(tuple(tensor.shape), _axes(mesh), tuple(map(_shard, tensor.placements)))


def _axes(mesh: DeviceMesh) -> tuple[tuple[str, int], ...]:
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    return tuple(zip(names, mesh.mesh.shape, strict=True))


def _shard(placement: Placement) -> Shard | None:
    if isinstance(placement, Replicate):
        return None
    if isinstance(placement, _StridedShard):
        return Shard(placement.dim, int(placement.split_factor))
    if isinstance(placement, TorchShard):
        return Shard(placement.dim)
    if isinstance(placement, Partial):
        raise LayoutError(f"is a partial sum, {placement!r}; add it up with redistribute first")
    raise LayoutError(f"is placed as {placement!r}; it must be Shard or Replicate")
