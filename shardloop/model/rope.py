"""Rotary position embeddings: frequencies, cos/sin tables, rotation.

Called by the decoder. Floor 2. Angles are computed in float32 whatever the model's dtype, because
published models were trained so: float64 angles would be a different model.
"""

import math

import torch
from torch import Tensor

from shardloop.model.config import Rope


def rope_frequencies(head_dim: int, rope: Rope) -> Tensor:
    """Radians per position of each rotated pair: float32 [head_dim / 2], the fastest first."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope["rope_theta"] ** exponents)
    return _stretch(frequencies, rope) if rope["rope_type"] == "llama3" else frequencies


def _stretch(frequencies: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1's context extension: stretch long wavelengths by `factor`, keep short ones."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    turns = rope["original_max_position_embeddings"] / wavelengths
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    stretched = (1 - kept) * frequencies / rope["factor"] + kept * frequencies
    # At the ramp's ends the formula is exact only up to rounding; these are exact.
    return torch.where(
        kept == 1, frequencies, torch.where(kept == 0, frequencies / rope["factor"], stretched)
    )


def rope_table(frequencies: Tensor, *, num_positions: int, dtype: torch.dtype) -> Tensor:
    """cos and sin of every position: `dtype` [2, num_positions, head_dim / 2]."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=frequencies.device)
    angles = positions[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate pair i of each head, (x[i], x[i + head_dim/2]), by its angle.

    Args:
        x: [rows, tokens, heads, head_dim].
        cos_sin: [2, rows, tokens, 1, head_dim / 2].
    """
    cos, sin = cos_sin
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
