"""The learning rate of a step. Called by the training loops. Floor 1."""

import math

from shardloop.config import OptimConfig


def learning_rate(step: int, total: int, optim: OptimConfig) -> float:
    """Learning rate of update `step` (from 0) of `total`.

    Warm-up is linear and starts above zero: step s of w warm-up steps has (s + 1) / w of the peak.
    Then constant, or a half cosine from the peak down to a tenth of it at step `total - 1`; where
    only that step is left after a warm-up, it has the tenth.

    Raises:
        ValueError: `step` is not in [0, total).
    """
    if not 0 <= step < total:
        raise ValueError(f"step={step}; choose a step in [0, {total})")
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    decay_steps = total - 1 - optim.warmup_steps
    if decay_steps:
        progress = (step - optim.warmup_steps) / decay_steps
    else:
        progress = 1.0 if optim.warmup_steps else 0.0
    return optim.lr * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress)))
