"""The collectives that tensor-parallel modules make, as a protocol and for one process.

Passed to the decoder and to the head; `parallel.tp` has the real ones. Floor 2.
"""

from typing import Protocol

from torch import Tensor


class TensorParallel(Protocol):
    """One rank's end of a tensor-parallel group; all ranks make the same calls in one order."""

    @property
    def rank(self) -> int:
        """This rank's place within the group, from 0."""
        ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Collective: the sum of all ranks' `x`, the same bits everywhere. May overwrite `x`."""
        ...

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Collective: the largest of all ranks' `x`, by element. May overwrite `x`."""
        ...

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        """Collective: all ranks' `x`, of one shape, joined along the last dim by rank."""
        ...


class SingleProcess:
    """A group of one: nothing to communicate."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return x

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        return x
