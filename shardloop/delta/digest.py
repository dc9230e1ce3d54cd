"""A digest of a tensor's bits that follows a sparse change without reading the rest. Floor 1.

Called by `delta.codec` and, to say what a receiver holds, by `transport.delta`. Modulo 2**64,

    D = sum over the elements of  bits_i * w_i,    w_i = column[i mod BLOCK] * row[i div BLOCK]

with odd hashed weights. If the elements at some positions change, D changes by the sum of
w_i * (new_i - old_i): the cost is that of the change.

What it sees: one changed element always (0 < |new_i - old_i| < 2**32, and w_i is odd); any other
difference but for chance, since the weights know nothing of the values.
"""

from functools import lru_cache

import torch
from torch import Tensor

from shardloop.errors import PlanError
from shardloop.splitmix import splitmix64

SHIFT = 16
BLOCK = 1 << SHIFT
"""Elements widened to int64 at a time: few enough for a CPU cache."""
INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def bits_of(tensor: Tensor) -> Tensor:
    """The bits of the elements in row-major order: int8, int16 or int32 [numel].

    A view of a contiguous tensor, a copy of any other.

    Raises:
        PlanError: elements of another size than 1, 2 or 4 bytes.
    """
    if tensor.dtype.itemsize not in INT_OF_SIZE:
        raise PlanError(
            f"a delta of {tensor.dtype} is not possible: its elements have {tensor.dtype.itemsize} "
            "bytes; allowed are 1, 2 and 4: convert to the dtype of the engine first"
        )
    return tensor.detach().reshape(-1).view(INT_OF_SIZE[tensor.dtype.itemsize])


def digest(tensor: Tensor) -> int:
    """D of all elements, a signed 64-bit number; does not depend on shape or strides."""
    bits = bits_of(tensor)
    column = _column(bits.device)
    sums = [
        part.to(torch.int64).mul_(column[: len(part)]).sum()
        for part in bits.split(BLOCK)
        if len(part)
    ]
    if not sums:
        return 0
    per_row = torch.stack(sums)
    rows = torch.arange(len(sums), device=bits.device)
    return int((per_row * _row(rows)).sum())


def digest_after(held: int, positions: Tensor, before: Tensor, after: Tensor) -> int:
    """D of a tensor of digest `held` once its elements at `positions` have other bits.

    Args:
        positions: int64 [C], increasing.
        before, after: bits [C] at these positions.
    """
    if len(positions) == 0:
        return held
    rows = _row(torch.arange(int(positions[-1] >> SHIFT) + 1, device=positions.device))
    change = after.to(torch.int64).sub_(before)
    change.mul_(_column(positions.device).index_select(0, positions & (BLOCK - 1)))
    change.mul_(rows.index_select(0, positions >> SHIFT))
    return signed(held + int(change.sum()))


def signed(value: int) -> int:
    """`value` modulo 2**64, as a signed number."""
    return (value + 2**63) % 2**64 - 2**63


@lru_cache
def _column(device: torch.device) -> Tensor:
    return splitmix64(torch.tensor(0), torch.arange(BLOCK)).bitwise_or_(1).to(device)


def _row(rows: Tensor) -> Tensor:
    return splitmix64(torch.ones_like(rows), rows) | 1
