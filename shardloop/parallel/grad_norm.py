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
    """Collective over the parameters' meshes: 2-norm of all gradients, float64 [], the same bits on
    every rank.

    Parameters are DTensors. Those cut along the same axes are added up together, over these axes
    alone, so that what is replicated along another axis counts once.
    """
    parts: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        assert isinstance(gradient, DTensor), "a trained parameter is a DTensor with a gradient"
        parts.setdefault(_cutting_groups(gradient), []).append(gradient.to_local())
    squares = []
    for groups, locals_ in parts.items():
        square = get_total_norm(locals_).double().square()
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def _cutting_groups(gradient: DTensor) -> tuple[dist.ProcessGroup, ...]:
    mesh = gradient.device_mesh
    for placement in gradient.placements:
        assert not placement.is_partial(), "a gradient was not summed over its ranks"
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    )


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], *, max_norm: float, norm: Tensor) -> None:
    """Scales gradients in place so that their global norm, now `norm`, is at most `max_norm`."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):
            local = parameter.grad.to_local()
            local.mul_(scale.to(local.dtype))
