"""Inverse CDF over a large vocabulary: sums of blocks first, then single tokens of one block.

Called by `engines.sampling`. Floor 2. Only sums of blocks are accumulated over the whole vocabulary
in float64; a cumulative sum of all its tokens would take longer than all else that a draw does.
Shapes: n rows, V vocabulary, C blocks, B tokens of a block.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCDF:
    """Unnormalised cumulative weights of n rows."""

    blocks_nCB: Tensor
    ends_nC: Tensor
    """float64: total weight up to the end of each block."""

    @classmethod
    def of(cls, weights_nV: Tensor) -> "BlockCDF":
        """From weights of 0 or more; not all of a row are 0."""
        num_padding = -weights_nV.shape[1] % BLOCK
        whole = F.pad(weights_nV, (0, num_padding)) if num_padding else weights_nV
        blocks_nCB = whole.view(len(whole), -1, BLOCK)
        return cls(blocks_nCB=blocks_nCB, ends_nC=blocks_nCB.sum(-1).double().cumsum(-1))

    @property
    def mass_n(self) -> Tensor:
        """float64: total weight of each row."""
        return self.ends_nC[:, -1]

    def inverse(self, u_n: Tensor) -> Tensor:
        """The first token whose share of the cumulative weight exceeds u: never one of weight 0.

        float64 u in (0, 1); int64 token ids.
        """
        target_n = u_n * self.mass_n
        block_n = _first_above(self.ends_nC, target_n)
        rows_n = torch.arange(len(u_n), device=u_n.device)
        before_n = torch.where(
            block_n > 0, self.ends_nC[rows_n, (block_n - 1).clamp(min=0)], torch.zeros_like(u_n)
        )
        within_nB = self.blocks_nCB[rows_n, block_n].double().cumsum(-1)
        return block_n * BLOCK + _first_above(within_nB, target_n - before_n)


def _first_above(cdf_nX: Tensor, target_n: Tensor) -> Tensor:
    """Index of the first value above the target; where rounding left none, of the last rise."""
    total_n = cdf_nX[:, -1]
    target_n = torch.minimum(target_n, torch.nextafter(total_n, torch.zeros_like(total_n)))
    return torch.searchsorted(cdf_nX, target_n[:, None], right=True)[:, 0]
