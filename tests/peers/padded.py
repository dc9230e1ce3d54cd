"""Random tokens as peers take them, [B, T] with a mask, and as this library does, flat."""

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS, TOKENS = 6, 7


@dataclass(frozen=True, kw_only=True)
class Padded:
    """float64 [B, T] each; rows of 1 to 7 tokens, one with a hole. Every prompt has two rows."""

    new_BT: Tensor
    """With gradient."""
    old_BT: Tensor
    ref_BT: Tensor
    engine_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor
    """bool."""

    @property
    def offsets(self) -> Tensor:
        return torch.arange(0, ROWS * TOKENS + 1, TOKENS)

    @property
    def group_B(self) -> Tensor:
        return torch.arange(ROWS) // 2

    @property
    def row_n(self) -> Tensor:
        return torch.arange(ROWS)[:, None].expand(-1, TOKENS)[self.mask_BT]


def random_padded(seed: int) -> Padded:
    """Ratios on both sides of the clips, up to e^2 or so; one advantage for each row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(size: float) -> Tensor:
        drawn = torch.randn(ROWS, TOKENS, generator=generator, dtype=torch.float64)
        return drawn * size

    old_BT = normal(1.0) - 3.0
    lengths_B = torch.tensor([1, 3, 7, 5, 2, 4])
    mask_BT = torch.arange(TOKENS) < lengths_B[:, None]
    mask_BT[2, 3] = False
    advantages_B1 = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
    return Padded(
        new_BT=(old_BT + normal(0.7)).requires_grad_(),
        old_BT=old_BT,
        ref_BT=old_BT + normal(0.3),
        engine_BT=old_BT + normal(0.5),
        advantages_BT=advantages_B1 * mask_BT,
        mask_BT=mask_BT,
    )
