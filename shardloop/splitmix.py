"""SplitMix64 on tensors: 64 random-looking bits for every (key, count), without a state. Floor 1.

Called by `engines.sampling` for its noise and by `reshard.fingerprint` for its weights.
"""

from torch import Tensor


def splitmix64(keys: Tensor, counts: Tensor) -> Tensor:
    """The generator of Steele, Lea and Flood (2014): the key is its state, the count its steps.

    int64 from int64, broadcast; all arithmetic wraps, so bits are those of unsigned numbers.
    """
    bits = keys + (counts + 1) * _signed(0x9E3779B97F4A7C15)
    bits = (bits ^ shift_right(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ shift_right(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ shift_right(bits, 31)


def shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift in zeros; `>>` of a signed integer repeats the sign."""
    shifted: Tensor = (bits >> count) & (2 ** (64 - count) - 1)
    return shifted


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant
