"""Memory that two processes of one host both see. Floor 3.

Called by `transport.shm`. The maker hands over an open descriptor (CPU) or a handle (GPU) and no
name, so nothing has to be unlinked: the system frees the memory when the last process that has it
open closes it or is killed.

    CPU    an anonymous file in memory (memfd), mapped by both
    GPU    a CUDA tensor of the maker, opened by the other through CUDA IPC
"""

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

Handle = tuple[Callable[..., Tensor], tuple[Any, ...]]


@dataclass(slots=True)
class Segment:
    """Bytes in one dim, and what it takes to open them elsewhere."""

    memory: Tensor | None
    """uint8 [size]; None once it is closed."""
    descriptor: int | None = None
    """On the CPU, with the maker: to be sent over a socket, until `handed_over`."""
    handle: Handle | None = None
    """On a GPU: can be pickled; `open_segment` takes it in another process."""

    @property
    def num_bytes(self) -> int:
        return 0 if self.memory is None else self.memory.nbytes

    def handed_over(self) -> None:
        """All others have it: the mapping keeps the memory, the descriptor has no more use."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def close(self) -> None:
        """Give this process's share back; views of `memory` must be gone. Can be repeated."""
        self.memory = None
        self.handed_over()


def make_segment(num_bytes: int, *, device: torch.device) -> Segment:
    """New memory of at least one byte, to be read by another process of this host."""
    num_bytes = max(1, num_bytes)
    if device.type == "cuda":
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return Segment(memory, handle=reduce_tensor(memory))
    descriptor = os.memfd_create("shardloop", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    return Segment(_mapped(descriptor), descriptor)


def open_segment(descriptor: int | None, handle: Handle | None) -> Segment:
    """What another process made. The descriptor is closed."""
    if descriptor is not None:
        try:
            return Segment(_mapped(descriptor))
        finally:
            os.close(descriptor)
    assert handle is not None, "a segment comes with a descriptor or a handle"
    rebuild, arguments = handle
    return Segment(rebuild(*arguments))


def _mapped(descriptor: int) -> Tensor:
    memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    return torch.frombuffer(memory, dtype=torch.uint8)


def settle(memory: Tensor) -> None:
    """Wait until what was queued on the memory's device is done; the CPU has no queue."""
    if memory.is_cuda:
        torch.cuda.current_stream(memory.device).synchronize()
