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
        eps: above 0, added to the std; keeps rewards that differ by rounding alone from being
            blown up.
    Returns:
        [P, G] in the dtype of `rewards_PG`, float32 if that is no floating type. Rows sum to 0 up
        to rounding. A row of equal rewards is exactly 0 (no signal), although its mean may be
        inexact: the same formula in float32 would give eight rewards of 0.35 an advantage of 0.029.
    Raises:
        UsageError: not two dims, G < 2 (a group of one has no std), a reward that is NaN or
            infinite, an unknown `std`, an eps that is not above 0, an advantage too large for the
            dtype (only without a std).
    """
    if std not in ("sample", "population", "none"):
        raise UsageError(f"std={std!r}; choose sample, population or none")
    if not 0.0 < eps < float("inf"):
        raise UsageError(f"eps={eps}; choose a finite value above 0")
    if rewards_PG.ndim != 2 or rewards_PG.shape[1] < 2:
        raise UsageError(
            f"rewards have shape {tuple(rewards_PG.shape)}; they must be [prompts, samples] "
            "with at least 2 samples per prompt, since the advantage compares them"
        )
    _check_finite("rewards", rewards_PG)
    rewards64_PG = rewards_PG.detach().double()
    is_equal_P1 = rewards64_PG.amax(1, keepdim=True) == rewards64_PG.amin(1, keepdim=True)
    unit_P1 = _power_of_two(rewards64_PG)
    scaled_PG = rewards64_PG / unit_P1
    centred_PG = scaled_PG - scaled_PG.mean(1, keepdim=True)
    if std == "none":
        advantages_PG = centred_PG * unit_P1
    else:
        spread_P1 = scaled_PG.std(1, correction=1 if std == "sample" else 0, keepdim=True)
        advantages_PG = centred_PG / (spread_P1 + eps / unit_P1)
    dtype = rewards_PG.dtype if rewards_PG.is_floating_point() else torch.float32
    advantages_PG = advantages_PG.masked_fill(is_equal_P1, 0.0).to(dtype)
    _check_finite("advantages", advantages_PG)
    return advantages_PG


def _check_finite(what: str, values_PG: Tensor) -> None:
    is_finite_P = values_PG.isfinite().all(1)
    if not bool(is_finite_P.all()):
        row = int((~is_finite_P).nonzero()[0])
        raise UsageError(
            f"{what} of prompt {row} are {values_PG[row].tolist()}; all must be finite: "
            "give rewards that are, and not near the largest number of their dtype"
        )


def _power_of_two(rewards_PG: Tensor) -> Tensor:
    """Of the size of each prompt's largest reward, [P, 1].

    Dividing by it changes no digit of the result, and lets no mean or square overflow or vanish.
    """
    largest_P1 = rewards_PG.abs().amax(1, keepdim=True)
    mantissa_P1 = largest_P1.frexp().mantissa
    power_P1 = largest_P1 / (2 * mantissa_P1)
    return torch.where(largest_P1 > 0, power_P1, 1.0).clamp(min=2.0**-1000)
