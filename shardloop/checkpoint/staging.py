"""Copies of a trainer's tensors that further training cannot change. Floor 3.

Called by `checkpoint.saver` and `checkpoint.writing`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from shardloop.parallel.fsdp import local_tensor


class Staging:
    """CPU memory as large as this rank's part of the tensors: made once, then used again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def fill(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of each tensor, copied into the buffers, which the next call overwrites.

        All calls give tensors of the same keys, shapes and dtypes.
        """
        for key, value in state.items():
            live = local_tensor(value)
            if key not in self._buffers:
                pinned = live.is_cuda  # else each copy would go through memory that is
                self._buffers[key] = torch.empty_like(live, device="cpu", pin_memory=pinned)
            buffer = self._buffers[key]
            assert (buffer.shape, buffer.dtype) == (live.shape, live.dtype), key
            buffer.copy_(live)
        assert state.keys() == self._buffers.keys()
        return dict(self._buffers)


class PlanOfAnother(DefaultSavePlanner):
    """Plans a save by tensors of which it reads only names, shapes and cuts, and takes the elements
    from this rank's parts of them, given apart."""

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._parts = parts

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn]
