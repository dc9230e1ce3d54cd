"""The layout of live tensors, read from their placements. Floor 3.

Called by the trainer, and by whoever holds a state dict of DTensors from elsewhere.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from shardloop.errors import LayoutError
from shardloop.families import CanonicalModel
from shardloop.layout import Layout
from shardloop.layout.observed import Placed, Shard, differences, layout_of_placements


def check_placed(declared: Layout, state: Mapping[str, Tensor], *, ranks: Sequence[int]) -> None:
    """No rank talks to another; the arguments are those of `layout_of_state_dict`.

    Raises:
        LayoutError: torch has placed tensors otherwise than the layout says; they are named.
    """
    found = differences(declared, layout_of_state_dict(declared.model, state, ranks=ranks))
    if found:
        raise LayoutError(
            f"torch has placed {len(found)} tensors otherwise than layout {declared.spec} says; "
            f"the first: {'; '.join(found[:3])}"
        )


def layout_of_state_dict(
    model: CanonicalModel, state: Mapping[str, Tensor], *, ranks: Sequence[int] | None = None
) -> Layout:
    """What every rank holds of a model, from one rank's DTensors; no rank talks to another.

    Args:
        state: by Hugging Face name; tensors that are no DTensors are whole on every rank.
        ranks: the global ranks, in the order of the layout; None: 0 to W-1.
    Raises:
        LayoutError: as `layout_of_placements`; or a tensor is a partial sum, is placed in a way
            that is not known, or its mesh has other ranks, or in another order.
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
            placed[name] = _placed(tensor, ranks)
        except LayoutError as error:
            faults.append(f"{name} {error}")
    if faults:
        raise LayoutError("; ".join(faults))
    return layout_of_placements(model, placed)


def _placed(tensor: DTensor, ranks: Sequence[int] | None) -> Placed:
    mesh = tensor.device_mesh
    found = mesh.mesh.flatten().tolist()
    wanted = list(range(len(found)) if ranks is None else ranks)
    if found != wanted:
        raise LayoutError(f"lies on ranks {found}; they must be {wanted}")
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
