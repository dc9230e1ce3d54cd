"""Cutting a policy over a mesh with FSDP2. Called by `parallel.build` and the trainer. Floor 3."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from shardloop.parallel.mesh import axis_names
from shardloop.policy import Policy


def shard_policy(
    policy: Policy,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Policy:
    """Collective over `mesh`: cuts every parameter on dim 0 along fsdp, in place, after tp.

    Each decoder layer is gathered on its own; embedding, final norm and head together around the
    whole forward. Gradients are *summed* over ranks: losses divide by global counts already, so
    an average would shrink them by the number of ranks.

    Args:
        compute_dtype: gathered weights, and so activations, are of it; None: the weights' own.
        reduce_dtype: gradients are summed in it over ranks and micro-batches.
    """
    data_axes = tuple(axis for axis in axis_names(mesh) if axis != "tp")
    data_mesh = mesh[data_axes]
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    layers: Iterable[nn.Module] = policy.model.layers  # type: ignore[assignment]
    # Resharding the root too keeps `parameters()` sharded after a forward without backward.
    for module in (*layers, policy):
        fully_shard(module, mesh=data_mesh, mp_policy=precision, reshard_after_forward=True)
    for sharded in _sharded_modules(policy):
        sharded.set_gradient_divide_factor(1.0)
        # Without this the factor becomes a premultiplied sum, which gloo does not have.
        sharded.set_force_sum_reduction_for_comms(True)
    return policy


def sum_gradients_in_next_backward(policy: Policy, *, now: bool) -> None:
    """Whether the next backward passes add what this rank has so far to the gradients of all ranks.

    Until then gradients stay whole on each rank: fewer sums, for the memory of one whole gradient
    in the dtype of the sums.
    """
    for module in _sharded_modules(policy):
        module.set_requires_gradient_sync(now, recurse=False)


def _sharded_modules(policy: Policy) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, perhaps of 0 rows; shares its storage, has no gradient."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def full_tensor(tensor: Tensor) -> Tensor:
    """Collective over the tensor's mesh: the whole tensor on every rank; may share its storage."""
    plain = tensor.detach()
    if not isinstance(plain, DTensor):
        return plain
    # One axis after the other, outermost first: fsdp cuts what tp has left, so it is undone first.
    for axis in range(plain.device_mesh.ndim):
        placements = list(plain.placements)
        placements[axis] = Replicate()
        plain = plain.redistribute(placements=placements)
    whole: Tensor = plain.to_local()
    return whole
