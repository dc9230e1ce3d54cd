"""From rewards to advantages: each completion against its own group. Floor 1; called by the loop.

Rewards 1, 0, 0, 1 of one prompt become

    grpo          ±0.8660    minus the group's mean, over its (sample) std
    rloo          ±0.6667    minus the mean of the group's OTHER samples
    reinforce++   ±0.8660    minus the group's mean, over the std of the whole batch's tokens

(the last in a batch of this one prompt, each completion of one token). A group of equal rewards is
exactly 0 under each of them.

Shapes: P prompts · G samples per prompt.
"""

import torch
from torch import Tensor

from shardloop.config import AdvantageKind, Std
from shardloop.errors import UsageError


def group_advantages(
    kind: AdvantageKind, rewards_PG: Tensor, *, std: Std, num_tokens_PG: Tensor
) -> Tensor:
    """The advantages named by `kind`, [P, G].

    Args:
        std: for "grpo".
        num_tokens_PG: int64, loss tokens of each completion, for "reinforce++".
    Raises:
        UsageError: an unknown kind, and as the function it names.
    """
    if kind == "grpo":
        return grpo_advantages(rewards_PG, std=std)
    if kind == "rloo":
        return rloo_advantages(rewards_PG)
    if kind == "reinforce++":
        return reinforce_pp_advantages(rewards_PG, num_tokens_PG=num_tokens_PG)
    raise UsageError(f"advantage={kind!r}; choose grpo, rloo or reinforce++")


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
    rewards64_PG, is_equal_P1 = _checked(rewards_PG)
    unit_P1 = _power_of_two(rewards64_PG)
    scaled_PG = rewards64_PG / unit_P1
    centred_PG = scaled_PG - scaled_PG.mean(1, keepdim=True)
    if std == "none":
        advantages_PG = centred_PG * unit_P1
    else:
        spread_P1 = scaled_PG.std(1, correction=1 if std == "sample" else 0, keepdim=True)
        advantages_PG = centred_PG / (spread_P1 + eps / unit_P1)
    return _finished(advantages_PG.masked_fill(is_equal_P1, 0.0), rewards_PG)


def rloo_advantages(rewards_PG: Tensor) -> Tensor:
    """Each reward minus the mean of the group's other rewards: G / (G - 1) times the centred one.

    [1, 0, 0, 1] gives +0.6667, -0.6667, -0.6667, +0.6667. Seven times 0.35 and once 0.95: the lone
    better sample gets 0.6, its lead over the others. There is no std in it, and in particular not
    that of the others, which is 0 here: where it is got as the root of a rounding error, dividing
    by it makes 0.6 into thousands.

    Source: Ahmadian et al. 2024 (Back to basics: REINFORCE leave-one-out).

    Args, Returns and Raises: as `grpo_advantages`.
    """
    rewards64_PG, is_equal_P1 = _checked(rewards_PG)
    unit_P1 = _power_of_two(rewards64_PG)
    scaled_PG = rewards64_PG / unit_P1
    size = rewards_PG.shape[1]
    lead_PG = (scaled_PG - scaled_PG.mean(1, keepdim=True)) * (size / (size - 1)) * unit_P1
    return _finished(lead_PG.masked_fill(is_equal_P1, 0.0), rewards_PG)


def reinforce_pp_advantages(rewards_PG: Tensor, *, num_tokens_PG: Tensor) -> Tensor:
    """Each reward minus its group's mean, then whitened over the loss tokens of the whole batch.

    A completion weighs in mean and std by its number of tokens (see `whiten`), as in verl's
    reinforce_plus_plus_baseline; OpenRLHF's reinforce_baseline divides by the population std. One
    difference to both: a group of equal rewards stays exactly 0, where theirs gets -mean / std.

    Source: Hu et al. 2025 (REINFORCE++, the variant with baseline).

    Args:
        num_tokens_PG: int64, the loss tokens of each completion.
    Returns, Raises: as `grpo_advantages`, and UsageError as `whiten`.
    """
    rewards64_PG, is_equal_P1 = _checked(rewards_PG)
    unit = _power_of_two(rewards64_PG).amax()
    scaled_PG = rewards64_PG / unit
    centred_PG = scaled_PG - scaled_PG.mean(1, keepdim=True)
    centred_PG = centred_PG.masked_fill(is_equal_P1, 0.0)
    white_PG = whiten(centred_PG, num_tokens=num_tokens_PG, eps=1e-6 / float(unit))
    return _finished(white_PG.masked_fill(is_equal_P1, 0.0), rewards_PG)


def whiten(values: Tensor, *, num_tokens: Tensor, eps: float = 1e-6) -> Tensor:
    """(value - mean) / (std + eps), mean and sample std taken over tokens: each value counts
    `num_tokens` times.

    Always of a whole batch: [1, 2, 5, 6] of one token each give (-1.0502, -0.6301, 0.6301, 1.0502),
    while the halves whitened apart would give (-0.7071, 0.7071) twice.

    Args:
        values: floats of any shape.
        num_tokens: of the same shape, 0 or more. Values with none count for nothing.
    Returns:
        Of the same shape and dtype; all exactly 0 where the values that count are equal.
    Raises:
        UsageError: shapes that differ, a negative count.
    """
    if num_tokens.shape != values.shape or bool((num_tokens < 0).any()):
        raise UsageError(
            f"num_tokens {tuple(num_tokens.shape)} and values {tuple(values.shape)}; "
            "pass one count of 0 or more for each value"
        )
    counted = values[num_tokens > 0]
    if not len(counted) or bool(counted.amax() == counted.amin()):
        return torch.zeros_like(values)
    tokens, wide = num_tokens.double(), values.double()
    centred = wide - (wide * tokens).sum() / tokens.sum()
    variance = (centred.square() * tokens).sum() / (tokens.sum() - 1)
    return (centred / (variance.sqrt() + eps)).to(values.dtype)


def _checked(rewards_PG: Tensor) -> tuple[Tensor, Tensor]:
    """The rewards in float64, and which groups have equal ones, [P, 1]."""
    if rewards_PG.ndim != 2 or rewards_PG.shape[1] < 2:
        raise UsageError(
            f"rewards have shape {tuple(rewards_PG.shape)}; they must be [prompts, samples] "
            "with at least 2 samples per prompt, since the advantage compares them"
        )
    _check_finite("rewards", rewards_PG)
    rewards64_PG = rewards_PG.detach().double()
    return rewards64_PG, rewards64_PG.amax(1, keepdim=True) == rewards64_PG.amin(1, keepdim=True)


def _finished(advantages_PG: Tensor, rewards_PG: Tensor) -> Tensor:
    """In the dtype of the rewards, float32 if that is no floating type."""
    dtype = rewards_PG.dtype if rewards_PG.is_floating_point() else torch.float32
    advantages_PG = advantages_PG.to(dtype)
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
