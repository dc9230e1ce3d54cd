"""What a problem's generator makes: cases, and the numbers in them. Called by `generator.py` files.

Numbers come from a counter and not from a random stream, so that a case is the same on every
machine, in every version of torch and in the browser.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardloop.splitmix import shift_right, splitmix64

Inputs = Mapping[str, Any]
"""By parameter: a value as in `judge.codec`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Case:
    """One call of the entry function, or, in a distributed problem, one on every rank."""

    name: str
    """Unique in the problem; of a case that is there for one trap, the trap's."""
    group: str
    """Of problem.toml."""
    inputs: Inputs = field(default_factory=dict)
    """Empty in a distributed problem."""
    gradients: tuple[str, ...] = ()
    """Parameters whose gradients are compared. All floating tensors among the inputs then require
    one, and those that are not named here must get none, or zeros. What is differentiated is the
    sum of all floating outputs. Empty in a distributed problem."""
    ranks: tuple[Inputs, ...] = ()
    """Inputs of each rank; empty but in a distributed problem."""
    max_sent: tuple[int, ...] | None = None
    """Bytes that each rank may send in all; None: any number."""


class Numbers:
    """Tensors of numbers that look random, decided by a seed and a word alone.

    Two with the same seed and word give the same numbers in the same order of calls.
    """

    def __init__(self, seed: int, word: str) -> None:
        digest = hashlib.sha256(f"{seed}/{word}".encode()).digest()
        self._key = torch.tensor(int.from_bytes(digest[:8], "little", signed=True))
        self._used = 0

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """float32, low <= x < high, but for rounding."""
        return (low + (high - low) * self._fractions(prod(shape))).float().reshape(shape)

    def normal(self, *shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        """float32, nearly normal: sums of twelve uniform numbers, so never beyond 6 std."""
        sums = self._fractions(12, prod(shape)).sum(0) - 6.0
        return (mean + std * sums).float().reshape(shape)

    def integers(self, *shape: int, low: int = 0, high: int) -> Tensor:
        """int64, low <= x < high."""
        if high <= low:
            raise ValueError(f"no integers from {low} to below {high}")
        return (shift_right(self._bits(prod(shape)), 1) % (high - low) + low).reshape(shape)

    def integer(self, low: int, high: int) -> int:
        """low <= x < high."""
        return int(self.integers(low=low, high=high))

    def permutation(self, n: int) -> Tensor:
        """int64 [n]: 0 .. n-1 in some order."""
        return torch.argsort(self._bits(n), stable=True)

    def _fractions(self, *shape: int) -> Tensor:
        """float64, 0 <= x < 1, of 53 bits."""
        return shift_right(self._bits(prod(shape)), 11).double().reshape(shape) * 2.0**-53

    def _bits(self, n: int) -> Tensor:
        """int64 [n]: 64 random-looking bits each."""
        counts = torch.arange(self._used, self._used + n)
        self._used += n
        return splitmix64(self._key, counts)
