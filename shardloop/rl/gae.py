"""Advantages from a value function, token by token (generalised advantage estimation). Floor 1.

A pure function for those who train a value model; the GRPO loop has none.

Shapes: B rows · N tokens of all rows · n loss tokens · L most loss tokens of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardloop.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class GAE:
    advantages_N: Tensor
    """As the values in dtype, 0 outside the mask."""
    returns_N: Tensor
    """advantages + values, what the value model should have said; 0 outside the mask."""


def gae_advantages(
    rewards_N: Tensor,
    values_N: Tensor,
    *,
    mask_N: Tensor,
    offsets: Tensor,
    gamma: float,
    lam: float,
) -> GAE:
    """A_t = Σ_k (gamma lam)^k δ_{t+k},  δ_t = r_t + gamma V_{t+1} - V_t,  within each row.

    Time runs over the row's loss tokens only: those outside the mask (prompt, tool output) are
    skipped as though they were not there, with their rewards and values. After the last one the
    value is 0, since a completion ends there.

    Rewards (0, 0, 1) with values (0.5, 0.6, 0.7) and gamma = 1: lam = 1 gives (0.5, 0.4, 0.3),
    reward to come minus value; lam = 0 gives the δ (0.1, 0.1, 0.3).

    Source: Schulman et al. 2015 (High-dimensional continuous control using GAE). Advantages are
    not whitened; `shardloop.rl.advantages.whiten` does that over a whole batch.

    Args:
        rewards_N, values_N: float [N]; no gradient flows.
        mask_N: bool [N].
        offsets: int64 [B + 1], as in `Batch`.
    Raises:
        UsageError: gamma or lam outside [0, 1], shapes that differ, a reward or value at a loss
            token that is not finite.
    """
    for name, value in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= value <= 1.0:
            raise UsageError(f"{name}={value}; choose a value in [0, 1]")
    if not rewards_N.shape == values_N.shape == mask_N.shape == (int(offsets[-1]),):
        shapes = [tuple(tensor.shape) for tensor in (rewards_N, values_N, mask_N)]
        raise UsageError(f"rewards, values and mask have shapes {shapes}; each needs one a token")
    rewards_n, values_n = rewards_N.detach()[mask_N], values_N.detach()[mask_N]
    if not bool((rewards_n.isfinite() & values_n.isfinite()).all()):
        raise UsageError("a reward or value at a loss token is NaN or infinite")
    row_n, step_n = _places(mask_N, offsets)
    deltas_n = rewards_n + gamma * _next_values(values_n, row_n) - values_n
    shape = (len(offsets) - 1, int(step_n.max()) + 1 if len(step_n) else 0)
    deltas_BL = deltas_n.new_zeros(shape)
    deltas_BL[row_n, step_n] = deltas_n
    for step in reversed(range(shape[1] - 1)):
        deltas_BL[:, step] += gamma * lam * deltas_BL[:, step + 1]
    advantages_n = deltas_BL[row_n, step_n]
    advantages_N, returns_N = torch.zeros_like(values_N), torch.zeros_like(values_N)
    advantages_N[mask_N] = advantages_n
    returns_N[mask_N] = advantages_n + values_n
    return GAE(advantages_N, returns_N)


def _places(mask_N: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Row of each loss token, and its place among the loss tokens of that row."""
    rows_B = torch.arange(len(offsets) - 1, device=mask_N.device)
    row_n = rows_B.repeat_interleave(offsets.diff())[mask_N]
    starts_B = row_n.bincount(minlength=len(rows_B)).cumsum(0).roll(1)
    starts_B[0] = 0
    return row_n, torch.arange(len(row_n), device=mask_N.device) - starts_B[row_n]


def _next_values(values_n: Tensor, row_n: Tensor) -> Tensor:
    """Value of the next loss token of the row; 0 after the last."""
    next_n = torch.zeros_like(values_n)
    goes_on = row_n[1:] == row_n[:-1]
    next_n[:-1][goes_on] = values_n[1:][goes_on]
    return next_n
