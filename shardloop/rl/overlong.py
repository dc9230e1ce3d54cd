"""The penalty of completions that come near the token limit. Floor 1; called by the loop."""

import torch
from torch import Tensor

from shardloop.errors import UsageError


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer: int) -> Tensor:
    """What to add to a completion's reward: 0 up to `max_tokens - buffer` tokens, then falling in a
    straight line to -1 at `max_tokens`.

    With 100 tokens and a buffer of 20: 80 tokens 0, 85 tokens -0.25, 100 tokens -1. The soft
    punishment of DAPO (Yu et al. 2025); a cliff at the limit would punish an answer for its last
    token alone.

    Args:
        lengths: tokens of each completion, integers of any shape.
    Returns:
        float64 of the same shape, in [-1, 0].
    Raises:
        UsageError: a buffer outside [1, max_tokens].
    """
    if not 1 <= buffer <= max_tokens:
        raise UsageError(f"buffer={buffer}; choose 1 to max_tokens={max_tokens}")
    excess = lengths.to(torch.float64) - (max_tokens - buffer)
    return -(excess / buffer).clamp(0.0, 1.0)
