"""How many elements of a low-precision copy change their bits in a step of the master. Floor 1.

A copy in bfloat16 follows its float32 master w by rounding to the nearest. Its bits change if a
boundary between two roundings lies between w and w + d. Boundaries are an ulp apart (the distance
of neighbouring numbers of the copy around w). Where w lies between two of them carries no sign of
the step: take it as uniform. Then the step of length |d| meets a boundary with probability

    p = min(1, |d| / ulp(w)),       ulp(w) = eps * 2**floor(log2 |w|)

and the expected density is the mean of p. The number that changes has variance sum p (1 - p) or
less. For bfloat16, eps = 2**-7: a weight of 0.02 has ulp 1.2e-4, so that a step of 1e-6 changes one
such weight in 120. Weights that never left a round number (a norm's 1.0 at the start of training)
are not uniform: they change later than predicted, and then together.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Density:
    """A share of elements that change, with its standard deviation."""

    mean: float
    std: float


def predicted_density(master: Tensor, change: Tensor, *, dtype: torch.dtype) -> Density:
    """The expected share of elements whose bits change in a copy of `dtype`.

    Args:
        master: float32, the weights before the step.
        change: float32, of the same shape: what the step adds to them.
        dtype: of the copy, a floating-point dtype narrower than the master's.
    """
    finfo = torch.finfo(dtype)
    exponent = torch.frexp(master.abs().clamp(min=finfo.smallest_normal)).exponent - 1
    ulp = torch.ldexp(torch.full_like(master, finfo.eps), exponent)
    p = (change.abs() / ulp).clamp(max=1.0).double()
    return Density(float(p.mean()), float((p * (1 - p)).sum().sqrt()) / max(1, p.numel()))
