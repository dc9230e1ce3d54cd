"""Tensor-parallel collectives over a process group.

Built by the workers that hold engines, and by trainers whose head is cut. Floor 3.
"""

import torch
import torch.distributed as dist
from torch import Tensor


class ProcessGroupTP:
    """`shardloop.model.TensorParallel` on a group of processes: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Collective over the group: the sum, written into `x`, the same bits on every rank."""
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Collective over the group: the largest by element, written into `x`."""
        x = x.contiguous()
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self._group)
        return x

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        """Collective over the group: all ranks' `x`, joined along the last dim by rank."""
        parts = torch.empty(self.size * x.numel(), dtype=x.dtype, device=x.device)
        dist.all_gather_single(parts, x.contiguous().view(-1), group=self._group)
        return torch.cat(parts.view(self.size, *x.shape).unbind(0), dim=-1)
