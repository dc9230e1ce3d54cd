"""The sender's end of one stretch of elements: what the other side was sent last. Floor 1.

Called by `transport.delta`, one for each bucket of each receiver.

    receiver holds the digest that was sent last ──▶ sparse delta (dense past the break-even)
    it holds anything else, or nothing was sent  ──▶ dense

A new receiver, a lost update, one that failed half-way and memory given up for a sleep all look the
same: another digest. None of them needs a word of its own.
"""

from torch import Tensor

from shardloop.delta.codec import Delta, encode


class DeltaSource:
    """Keeps a copy of the elements it last made a delta for."""

    def __init__(self) -> None:
        self._kept: Tensor | None = None
        self._digest = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the copy: as much as the elements themselves."""
        return 0 if self._kept is None else self._kept.nbytes

    def update(self, new: Tensor, *, holds: int) -> Delta:
        """What the receiver needs to hold `new`. From now on it is taken to hold it.

        Args:
            new: contiguous, of the same shape and dtype at each call; a dense delta shares its
                memory.
            holds: digest of what the receiver holds now.
        """
        if self._kept is None or self._digest != holds:
            delta = encode(None, new)
        else:
            delta = encode(self._kept, new, base=holds)
        if self._kept is None:
            self._kept = new.clone()
        else:
            self._kept.copy_(new)  # cheaper than applying the delta, from 1 % of changes on
        self._digest = delta.result
        return delta
