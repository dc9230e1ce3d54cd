"""Cutting a policy over a mesh with FSDP2, and its gradients. Called by the trainer. Floor 3."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardloop.policy import Policy


def shard_policy(policy: Policy, mesh: DeviceMesh) -> Policy:
    """Collective over `mesh`: turns every parameter into a DTensor cut on dim 0, in place.

    Each decoder layer is gathered on its own; embedding, final norm and head together around the
    whole forward. Gradients are *summed* over ranks: losses divide by global counts already, so
    an average would shrink them by the number of ranks.
    """
    layers: Iterable[nn.Module] = policy.model.layers  # type: ignore[assignment]
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # Resharding the root too keeps `parameters()` sharded after a forward without backward.
    fully_shard(policy, mesh=mesh, reshard_after_forward=True)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this the factor becomes a premultiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
    return policy


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, perhaps of 0 rows; shares its storage, has no gradient."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def full_tensor(tensor: Tensor) -> Tensor:
    """Collective over the tensor's mesh: the whole tensor on every rank."""
    plain = tensor.detach()
    return plain.full_tensor() if isinstance(plain, DTensor) else plain


@torch.no_grad()
def global_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Collective over the parameters' mesh: 2-norm of all gradients, the same on every rank."""
    gradients = (parameter.grad for parameter in parameters)
    norm = get_total_norm([gradient for gradient in gradients if gradient is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def scale_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float, norm: Tensor) -> None:
    """Scales gradients in place so that their global norm, now `norm`, is at most `max_norm`."""
    clip_grads_with_norm_(parameters, max_norm, norm)
