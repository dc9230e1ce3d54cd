"""Increasing positions as distances, in one or two bytes each. Called by `delta.codec`. Floor 1.

The gap of a position is the number of positions left out before it. A gap is written in symbols of
one byte (escape 255) or two (escape 65535), whichever makes the whole shorter:

    gap = escapes * escape + rest      is      escapes times the escape, then rest (< escape)

At random positions of density p a gap exceeds 254 with probability (1-p)**255, so a one-byte gap
takes 1 / (1 - (1-p)**255) bytes on average: 1.02 at 1.5 %, 1.00 from 3 % on. Two bytes win below
about 0.3 %.
"""

import torch
from torch import Tensor

from shardloop.errors import FingerprintError

ESCAPES = {torch.int8: 255, torch.int16: 65535}
"""By the dtype of a symbol. As signed bits each escape is -1."""


def encode_gaps(positions: Tensor) -> Tensor:
    """Symbols, int8 or int16, from increasing positions, int64 [C]."""
    gaps = positions.diff(prepend=positions.new_tensor([-1])) - 1
    lengths = {symbol: _num_symbols(gaps, escape) for symbol, escape in ESCAPES.items()}
    symbol = min(lengths, key=lambda dtype: lengths[dtype] * dtype.itemsize)
    escape = ESCAPES[symbol]
    escapes = gaps // escape
    ends = (escapes + 1).cumsum(0) - 1
    symbols = torch.full((lengths[symbol],), -1, dtype=symbol, device=gaps.device)
    return symbols.index_copy_(0, ends, (gaps - escapes * escape).to(symbol))


def _num_symbols(gaps: Tensor, escape: int) -> int:
    return len(gaps) + int((gaps[gaps >= escape] // escape).sum())


def decode_gaps(symbols: Tensor, *, num_positions: int, num_elements: int) -> Tensor:
    """The positions, int64 [num_positions].

    Raises:
        FingerprintError: another number of positions, or one that is not below `num_elements`.
    """
    escape = ESCAPES[symbols.dtype]
    steps = symbols.to(torch.int64).bitwise_and_(escape)
    ends = steps != escape
    positions = steps.add_(ends).cumsum(0)[ends] - 1
    if len(positions) != num_positions or bool((positions[-1:] >= num_elements).any()):
        last = int(positions[-1]) if len(positions) else None
        raise FingerprintError(
            f"a delta arrived damaged: {len(positions)} positions up to {last}, it was sent with "
            f"{num_positions} below {num_elements}; nothing was changed, send it again"
        )
    return positions
