"""Draws tokens from logits with noise that depends only on (seed, sample id, position).

Called by the local engine, once per step for all rows. Floor 2. Shapes: n rows, V vocabulary, m the
rows that are truncated. A token is the inverse CDF of its (truncated) distribution at one uniform
number, so neither the other rows, nor the slot, nor the number of ranks has a say in it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from shardloop.head import temper_
from shardloop.splitmix import shift_right, splitmix64
from shardloop.types import Request, SampleId

NO_LIMIT = 2**63 - 1
"""A top-k as large as a tensor can say, and larger than any vocabulary."""
TOP_P_SLACK = 1e-6
"""A kept set may fall short of top_p by this much: rounding must not add a token to a full set."""


def noise_key(seed: int, sample_id: SampleId) -> int:
    """64 bits, as a signed integer, that stand for one sample of one seed."""
    identity = json.dumps([seed, sample_id.prompt_uid, sample_id.index, sample_id.attempt])
    return int.from_bytes(blake2b(identity.encode(), digest_size=8).digest(), "little", signed=True)


def uniforms(keys_n: Tensor, positions_n: Tensor) -> Tensor:
    """One number strictly between 0 and 1 per (key, position): float64 [n], from int64 [n] each."""
    bits = splitmix64(keys_n, positions_n)
    # 52 bits and a half: the greatest value is still below 1 in float64.
    uniform_n: Tensor = (shift_right(bits, 12).double() + 0.5) * 2.0**-52
    return uniform_n


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """The sampling settings of n requests as tensors."""

    keys_n: Tensor
    temperature_n: Tensor
    top_p_n: Tensor
    top_k_n: Tensor

    @classmethod
    def of(cls, requests: Sequence[Request], *, device: torch.device) -> "SamplingRows":
        drawn = [request.sampling for request in requests]
        keys = [noise_key(request.seed, request.sample_id) for request in requests]

        def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            keys_n=column(keys, torch.int64),
            temperature_n=column([s.temperature for s in drawn], torch.float64),
            top_p_n=column([s.top_p for s in drawn], torch.float64),
            top_k_n=column([min(s.top_k, NO_LIMIT) for s in drawn], torch.int64),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """One token for each of n rows."""

    token_ids_n: Tensor
    """int64."""
    behave_n: Tensor
    """float64: log-prob under the distribution sampled from; 0 where greedy, a certain choice."""
    full_n: Tensor
    """float64: log-prob under the full distribution at the row's temperature (1 where greedy)."""


def draw(logits_nV: Tensor, rows: SamplingRows, *, positions_n: Tensor) -> Drawn:
    """Sample one token per row.

    Args:
        logits_nV: float32 or float64, real ids only.
        positions_n: int64, how many tokens each sample has drawn before.
    """
    greedy_n = rows.temperature_n == 0
    temperature_n = torch.where(greedy_n, 1.0, rows.temperature_n)
    logprobs_nV = torch.log_softmax(temper_(logits_nV.clone(), temperature_n), dim=-1)
    probs_nV = truncate(logprobs_nV.double().exp(), top_p_n=rows.top_p_n, top_k_n=rows.top_k_n)
    cdf_nV = probs_nV.cumsum(-1)
    mass_n = cdf_nV[:, -1]
    drawn_n = _inverse_cdf(cdf_nV, uniforms(rows.keys_n, positions_n))
    token_ids_n = torch.where(greedy_n, logits_nV.argmax(-1), drawn_n)
    full_n = logprobs_nV.gather(1, token_ids_n[:, None])[:, 0].double()
    truncated_n = (rows.top_k_n > 0) | (rows.top_p_n < 1)
    behave_n = torch.where(truncated_n, full_n - mass_n.log(), full_n)
    return Drawn(
        token_ids_n=token_ids_n,
        behave_n=torch.where(greedy_n, 0.0, behave_n),
        full_n=full_n,
    )


def truncate(probs_nV: Tensor, *, top_p_n: Tensor, top_k_n: Tensor) -> Tensor:
    """Set to 0 what is outside top-k, then outside top-p of what is left; not renormalised.

    top-p keeps the fewest likeliest tokens whose share reaches it, and at least one. Of equal
    tokens the lower id counts as likelier.
    """
    limited_n = (top_k_n > 0) | (top_p_n < 1)
    if not limited_n.any():
        return probs_nV
    sorted_mV, order_mV = probs_nV[limited_n].sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(probs_nV.shape[1], device=probs_nV.device)
    top_k_m = torch.where(top_k_n > 0, top_k_n, probs_nV.shape[1])[limited_n]
    sorted_mV = sorted_mV.masked_fill(ranks_V >= top_k_m[:, None], 0.0)
    share_mV = sorted_mV / sorted_mV.sum(-1, keepdim=True)
    before_mV = share_mV.cumsum(-1) - share_mV
    full_mV = (before_mV >= top_p_n[limited_n, None] - TOP_P_SLACK) & (ranks_V > 0)
    full_mV &= top_p_n[limited_n, None] < 1
    kept_mV = torch.zeros_like(sorted_mV).scatter_(1, order_mV, sorted_mV.masked_fill(full_mV, 0.0))
    return probs_nV.masked_scatter(limited_n[:, None], kept_mV)


def _inverse_cdf(cdf_nV: Tensor, u_n: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds u: never one of probability 0."""
    total_n = cdf_nV[:, -1]
    target_n = torch.minimum(u_n * total_n, torch.nextafter(total_n, torch.zeros_like(total_n)))
    return torch.searchsorted(cdf_nV, target_n[:, None], right=True)[:, 0]
