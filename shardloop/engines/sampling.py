"""Draws tokens from logits with noise that depends only on (seed, sample id, position).

Called by the local engine, once per step for all rows. Floor 2. Shapes: n rows, V vocabulary, m
rows that top-k or top-p cuts. A token is the inverse CDF of its (truncated) distribution at one
uniform number, so neither the other rows, nor the slot, nor the number of ranks has a say in it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch
from torch import Tensor

from shardloop.engines.inverse_cdf import BlockCDF
from shardloop.head import temper_
from shardloop.invariant import exact_logprobs
from shardloop.splitmix import shift_right, splitmix64
from shardloop.types import Request, SampleId

TILE = 2**17
"""Logits of a tile: few enough to stay in a cache while they are walked several times."""
NO_LIMIT = 2**63 - 1
"""A top-k as large as a tensor can say, and larger than any vocabulary."""
TOP_P_SLACK = 1e-6
"""A kept set may fall short of top_p by this much: rounding must not add a token to a full set."""


def noise_key(seed: int, sample_id: SampleId) -> int:
    """64 bits, as a signed integer, that stand for one sample of one seed."""
    parts = [seed, sample_id.prompt_uid, sample_id.index, sample_id.attempt]
    # The first turn is named by the rest alone, so that turns add noise without changing any.
    parts += [sample_id.turn] if sample_id.turn else []
    digest = blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


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
    min_p_n: Tensor

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
            min_p_n=column([s.min_p for s in drawn], torch.float64),
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
        logits_nV: finite, float32 or float64, real ids only.
        positions_n: int64, how many tokens each sample has drawn before.
    """
    greedy_n = rows.temperature_n == 0
    temperature_n = torch.where(greedy_n, 1.0, rows.temperature_n)
    weights_nV, most_n = weights_of(logits_nV, temperature_n)
    kept_nV = truncate(weights_nV, top_p_n=rows.top_p_n, top_k_n=rows.top_k_n, min_p_n=rows.min_p_n)
    full = BlockCDF.of(weights_nV)
    kept = full if kept_nV is weights_nV else BlockCDF.of(kept_nV)
    token_ids_n = kept.inverse(uniforms(rows.keys_n, positions_n))
    if greedy_n.any():
        token_ids_n[greedy_n] = logits_nV[greedy_n].argmax(-1)
    drawn_n = logits_nV.gather(1, token_ids_n[:, None])[:, 0]
    # The likeliest token has weight 1, so no mass is below that.
    log_weight_n = temper_(torch.stack((drawn_n, most_n), 1), temperature_n)[:, 0].double()
    return Drawn(
        token_ids_n=token_ids_n,
        behave_n=torch.where(greedy_n, 0.0, log_weight_n - kept.mass_n.log()),
        full_n=log_weight_n - full.mass_n.log(),
    )


def weights_of(logits_nV: Tensor, temperature_n: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(logits / temperature) before its division, and each row's largest logit [n].

    The largest weight of each row is 1. Tile by tile: several walks over all [n, V] would each
    fetch it from memory again.
    """
    weights_nV, most_n1 = torch.empty_like(logits_nV), logits_nV.new_empty(len(logits_nV), 1)
    is_tempered = bool((temperature_n != 1).any())
    num_rows = max(1, TILE // logits_nV.shape[1])
    whole = (weights_nV, most_n1, logits_nV, temperature_n)
    for weights_mV, most_m1, logits_mV, temperature_m in zip(
        *(x.split(num_rows) for x in whole), strict=True
    ):
        torch.amax(logits_mV, -1, keepdim=True, out=most_m1)
        torch.sub(logits_mV, most_m1, out=weights_mV)
        if is_tempered:
            temper_(weights_mV, temperature_m)
        weights_mV.exp_()
    return weights_nV, most_n1[:, 0]


def restated(drawn: Drawn, logits_nV: Tensor, rows: SamplingRows) -> Drawn:
    """`drawn` with the log-probs that a trainer computes; tokens and what was cut off stay."""
    temperature_n = torch.where(rows.temperature_n == 0, 1.0, rows.temperature_n)
    full_n = exact_logprobs(logits_nV, drawn.token_ids_n, temperature_n)[0].double()
    behave_n = torch.where(
        rows.temperature_n == 0, drawn.behave_n, full_n + (drawn.behave_n - drawn.full_n)
    )
    return replace(drawn, full_n=full_n, behave_n=behave_n)


def truncate(weights_nV: Tensor, *, top_p_n: Tensor, top_k_n: Tensor, min_p_n: Tensor) -> Tensor:
    """Set to 0 what is outside top-k, then outside top-p of what is left, then below min-p.

    top-p keeps the fewest likeliest tokens whose share reaches it, and at least one. Of equal
    tokens the lower id counts as likelier. min-p keeps what is at least that share of the row's
    largest weight. Weights need not sum to 1 and are not renormalised. Where no row is limited the
    result is `weights_nV` itself.
    """
    kept_nV = weights_nV
    limited_n = (top_k_n > 0) | (top_p_n < 1)
    if limited_n.any():
        kept_mV = _top(
            weights_nV[limited_n], top_p_m=top_p_n[limited_n], top_k_m=top_k_n[limited_n]
        )
        kept_nV = kept_nV.masked_scatter(limited_n[:, None], kept_mV)
    if (min_p_n > 0).any():
        least_n1 = min_p_n[:, None] * kept_nV.amax(-1, keepdim=True).double()
        kept_nV = kept_nV.masked_fill(kept_nV < least_n1, 0.0)
    return kept_nV


def _top(weights_mV: Tensor, *, top_p_m: Tensor, top_k_m: Tensor) -> Tensor:
    """`truncate` by top-k and top-p, of rows that have at least one of them."""
    sorted_mV, order_mV = weights_mV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(weights_mV.shape[1], device=weights_mV.device)
    most_m1 = torch.where(top_k_m > 0, top_k_m, weights_mV.shape[1])[:, None]
    sorted_mV = sorted_mV.masked_fill(ranks_V >= most_m1, 0.0)
    share_mV = sorted_mV / sorted_mV.sum(-1, keepdim=True, dtype=torch.float64)
    before_mV = share_mV.cumsum(-1) - share_mV
    full_mV = (before_mV >= top_p_m[:, None] - TOP_P_SLACK) & (ranks_V > 0)
    full_mV &= top_p_m[:, None] < 1
    return torch.zeros_like(sorted_mV).scatter_(1, order_mV, sorted_mV.masked_fill(full_mV, 0.0))
