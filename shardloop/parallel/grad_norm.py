"""The norm of gradients that are cut in different ways, and clipping to it. Floor 3.

Called by the trainer before an update.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm


@torch.no_grad()
def global_grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Collective over the parameters' mesh: 2-norm of all gradients, float64 [], the same bits on
    every rank, whatever lies in the gradients.

    Parameters are DTensors of one mesh. What several ranks hold counts on each of them for its
    share, so that one sum over the whole mesh is the answer.
    """
    gradients = [_gradient(parameter) for parameter in parameters]
    by_copies: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        by_copies.setdefault(_num_copies(gradient), []).append(gradient.to_local())
    parts = [get_total_norm(part).double().square() / n for n, part in by_copies.items()]
    square, mesh = torch.stack(parts).sum(), gradients[0].device_mesh
    for axis in range(mesh.ndim):
        dist.all_reduce(square, group=mesh.get_group(axis))
    return square.sqrt()


def _gradient(parameter: nn.Parameter) -> DTensor:
    gradient = parameter.grad
    assert isinstance(gradient, DTensor), "a trained parameter is a DTensor with a gradient"
    return gradient


def _num_copies(gradient: DTensor) -> int:
    """How many ranks hold the same part."""
    copies = 1
    for axis, placement in enumerate(gradient.placements):
        assert not placement.is_partial(), "a gradient was not summed over its ranks"
        copies *= gradient.device_mesh.size(axis) if placement.is_replicate() else 1
    return copies


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float, norm: Tensor) -> None:
    """Scales gradients in place so that their global norm, now `norm`, is at most `max_norm`."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            local = parameter.grad.to_local()
            local.mul_(scale.to(local.dtype))
