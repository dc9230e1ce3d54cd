"""From rewards to advantages: each completion against its own group. Floor 1.

Called by the controller. Shapes: P prompts · G samples per prompt.
"""

import torch
from torch import Tensor

from shardloop.config import Std
from shardloop.errors import UsageError


def grpo_advantages(rewards_PG: Tensor, *, std: Std = "sample", eps: float = 1e-6) -> Tensor:
    """Centre each prompt's rewards on its own group's mean and scale by its std.

    (r - mean) / (std + eps), in float64 inside. Statistics never cross groups: [1, 0] and [10, 9]
    both give ±0.7071.

    Args:
        rewards_PG: [P, G], one row per prompt.
        std: "sample" (ddof 1, GRPO), "population" (ddof 0) or "none" (centre only, Dr. GRPO).
        eps: added to the std; keeps rewards that differ by rounding alone from being blown up.
    Returns:
        [P, G] in the dtype of `rewards_PG`, float32 if that is no floating type. Rows sum to 0 up
        to rounding. A row of equal rewards is exactly 0 (no signal), although its mean may be
        inexact: the same formula in float32 would give eight rewards of 0.35 an advantage of 0.029.
    Raises:
        UsageError: not two dims, G < 2 (a group of one has no std), a reward that is NaN or
            infinite, an unknown `std`.
    """
    if rewards_PG.ndim != 2 or rewards_PG.shape[1] < 2:
        raise UsageError(
            f"rewards have shape {tuple(rewards_PG.shape)}; they must be [prompts, samples] "
            "with at least 2 samples per prompt, since the advantage compares them"
        )
    is_finite_P = rewards_PG.isfinite().all(1)
    if not bool(is_finite_P.all()):
        row = int((~is_finite_P).nonzero()[0])
        raise UsageError(
            f"rewards of prompt {row} are {rewards_PG[row].tolist()}; every reward must be finite"
        )
    rewards64_PG = rewards_PG.detach().double()
    centred_PG = rewards64_PG - rewards64_PG.mean(1, keepdim=True)
    is_equal_P1 = rewards64_PG.amax(1, keepdim=True) == rewards64_PG.amin(1, keepdim=True)
    advantages_PG = centred_PG / _scale(rewards64_PG, std=std, eps=eps)
    dtype = rewards_PG.dtype if rewards_PG.is_floating_point() else torch.float32
    return advantages_PG.masked_fill(is_equal_P1, 0.0).to(dtype)


def _scale(rewards_PG: Tensor, *, std: Std, eps: float) -> Tensor:
    """What the centred rewards are divided by, [P, 1]."""
    if std == "none":
        return torch.ones_like(rewards_PG[:, :1])
    ddof = {"sample": 1, "population": 0}.get(std)
    if ddof is None:
        raise UsageError(f"std={std!r}; choose sample, population or none")
    return rewards_PG.std(1, correction=ddof, keepdim=True) + eps
