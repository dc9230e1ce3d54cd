"""Noise that belongs to the sample, and log-probs of the distribution really drawn from."""

import math
from dataclasses import replace
from hashlib import blake2b

import pytest
import torch
from torch import Tensor

from shardloop.engines.inverse_cdf import BLOCK, BlockCDF
from shardloop.engines.sampling import SamplingRows, draw, noise_key, truncate, uniforms
from shardloop.types import Request, SampleId, Sampling

CPU = torch.device("cpu")


def rows_of(num_rows: int, **sampling) -> SamplingRows:
    requests = [
        Request(
            prompt_ids=(0,),
            sampling=Sampling(max_tokens=1, **sampling),
            sample_id=SampleId(prompt_uid="p", index=index),
            seed=0,
        )
        for index in range(num_rows)
    ]
    return SamplingRows.of(requests, device=CPU)


def draw_many(logits_V: Tensor, num_rows: int, **sampling):
    return draw(
        logits_V.expand(num_rows, -1),
        rows_of(num_rows, **sampling),
        positions_n=torch.zeros(num_rows, dtype=torch.int64),
    )


def splitmix64(key: int, position: int) -> float:
    """The textbook generator in Python integers."""
    mask = 2**64 - 1
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return ((z >> 12) + 0.5) / 2**52


def test_uniforms_equal_the_textbook_generator(seed):
    keys = [noise_key(seed, SampleId(prompt_uid="q", index=index)) for index in range(50)]
    keys += [0, -1, 2**63 - 1, -(2**63)]
    positions = [index * 37 % 11 for index in range(len(keys))]
    expected = [splitmix64(k % 2**64, p) for k, p in zip(keys, positions, strict=True)]
    assert uniforms(torch.tensor(keys), torch.tensor(positions)).tolist() == expected
    assert all(0.0 < u < 1.0 for u in expected)


def test_uniforms_are_uniform_over_samples_and_over_positions():
    n = 20_000
    one_key = uniforms(
        torch.full((n,), noise_key(0, SampleId(prompt_uid="p", index=0))), torch.arange(n)
    )
    many_keys = torch.tensor([noise_key(0, SampleId(prompt_uid="p", index=i)) for i in range(n)])
    for u in (one_key, uniforms(many_keys, torch.zeros(n, dtype=torch.int64))):
        # Kolmogorov-Smirnov at a level of about 1e-6.
        gap = (u.sort().values - (torch.arange(n) + 0.5) / n).abs().max()
        assert gap < 2.7 / math.sqrt(n)


def test_noise_depends_on_every_part_of_the_identity():
    base = {"prompt_uid": "p", "index": 1, "attempt": 2}
    changes = [
        {},
        {"prompt_uid": "p1"},
        {"turn": 1},
        {"turn": 2},
        {"index": 2},
        {"attempt": 1},
        {"index": 2, "attempt": 1},
    ]
    keys = [noise_key(0, SampleId(**(base | change))) for change in changes]
    keys += [noise_key(1, SampleId(**base)), noise_key(0, SampleId(prompt_uid="p, 1", index=2))]
    assert len(set(keys)) == len(keys)
    assert keys[0] == noise_key(0, SampleId(**base))


def test_the_noise_of_first_turns_is_what_it_was_before_there_were_turns():
    digest = blake2b(b'[7, "p", 1, 2]', digest_size=8).digest()
    expected = int.from_bytes(digest, "little", signed=True)
    assert noise_key(7, SampleId(prompt_uid="p", index=1, attempt=2)) == expected


def test_a_row_is_drawn_alike_in_any_batch(seed):
    logits = torch.randn(40, 23, generator=torch.Generator().manual_seed(seed)).double()
    rows, positions = rows_of(40, temperature=0.8, top_p=0.9), torch.arange(40)
    whole = draw(logits, rows, positions_n=positions)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:17]
    some = SamplingRows(
        keys_n=rows.keys_n[order],
        temperature_n=rows.temperature_n[order],
        top_p_n=rows.top_p_n[order],
        top_k_n=rows.top_k_n[order],
        min_p_n=rows.min_p_n[order],
    )
    part = draw(logits[order], some, positions_n=positions[order])
    assert torch.equal(part.token_ids_n, whole.token_ids_n[order])
    assert torch.equal(part.behave_n, whole.behave_n[order])


def test_log_probs_are_at_the_sampling_temperature():
    logits = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    drawn = draw_many(logits, 50, temperature=0.6)
    expected = torch.log_softmax(logits / 0.6, -1)[drawn.token_ids_n]
    torch.testing.assert_close(drawn.full_n, expected, rtol=0, atol=1e-14)
    assert torch.equal(drawn.behave_n, drawn.full_n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "limit", [{"top_p": 0.8}, {"top_k": 2}, {"top_p": 0.99, "top_k": 2}, {"min_p": 0.5}]
)
def test_behave_is_renormalised_over_the_kept_tokens(dtype, limit):
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=dtype).log()
    drawn = draw_many(logits, 200, **limit)
    assert set(drawn.token_ids_n.tolist()) == {0, 1}
    # The kept mass is .5 + .3: per token, p / .8 was sampled from where p is the full probability.
    gap = drawn.behave_n - drawn.full_n
    torch.testing.assert_close(gap, torch.full_like(gap, -math.log(0.8)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "limit", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.3}, {"temperature": 1.7}]
)
def test_frequencies_match_the_reported_log_probs(limit):
    logits = torch.tensor([0.3, -1.0, 1.2, 0.0, 0.9, -0.4], dtype=torch.float64)
    n = 20_000
    drawn = draw_many(logits, n, **limit)
    for token in drawn.token_ids_n.unique():
        mine = drawn.token_ids_n == token
        p = drawn.behave_n[mine][0].exp().item()
        assert abs(mine.sum().item() / n - p) < 5 * math.sqrt(p * (1 - p) / n)
    total = sum(drawn.behave_n[drawn.token_ids_n == t][0].exp() for t in drawn.token_ids_n.unique())
    assert total == pytest.approx(1.0, abs=1e-9), "the tokens drawn are all that can be drawn"


def slow_truncate(probs: list[float], top_p: float, top_k: int, min_p: float) -> list[float]:
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    order = order[:top_k] if top_k else order
    kept, share, whole = [], 0.0, sum(probs[token] for token in order)
    for token in order:
        kept.append(token)
        share += probs[token] / whole
        if top_p < 1 and share >= top_p - 1e-6:
            break
    least = min_p * max(probs)
    return [p if token in kept and p >= least else 0.0 for token, p in enumerate(probs)]


def test_truncation_equals_the_slow_reference_with_mixed_rows(seed):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randint(1, 8, (60, 9), generator=generator).double()  # many ties
    probs /= probs.sum(-1, keepdim=True)
    top_p = torch.tensor([1.0, 0.5, 0.9, 1e-9]).repeat(15).double()
    top_k = torch.tensor([0, 1, 3, 20, 0]).repeat(12)
    min_p = (
        torch.tensor([0.0, 0.3, 0.999]).repeat(20).double()[torch.randperm(60, generator=generator)]
    )
    expected = [
        slow_truncate(row.tolist(), *limits)
        for row, *limits in zip(probs, top_p.tolist(), top_k.tolist(), min_p.tolist(), strict=True)
    ]
    assert truncate(probs, top_p_n=top_p, top_k_n=top_k, min_p_n=min_p).tolist() == expected


def test_min_p_is_a_share_of_the_likeliest_and_behave_is_renormalised(seed):
    logits = 2.0 * torch.rand(200, generator=torch.Generator().manual_seed(seed)).double()
    probs = (logits / 0.7).softmax(-1)
    drawn = draw_many(logits, 4000, temperature=0.7, min_p=0.4)
    kept = probs >= 0.4 * probs.max()
    assert 1 < kept.sum() < 100, "a share of the sum would keep none of 200 tokens"
    assert set(drawn.token_ids_n.tolist()) == set(kept.nonzero()[:, 0].tolist())
    tokens = drawn.token_ids_n
    torch.testing.assert_close(drawn.full_n, probs.log()[tokens], rtol=0, atol=1e-12)
    renormalised = (probs / probs[kept].sum()).log()[tokens]
    torch.testing.assert_close(drawn.behave_n, renormalised, rtol=0, atol=1e-12)


def test_rows_that_no_limit_cuts_are_not_copied():
    weights, off = torch.rand(3, 9), torch.zeros(3, dtype=torch.int64)
    ones, zeros = torch.ones(3).double(), torch.zeros(3).double()
    assert truncate(weights, top_p_n=ones, top_k_n=off, min_p_n=zeros) is weights


@pytest.mark.parametrize("num_tokens", [1, 5, BLOCK, BLOCK + 1, 5 * BLOCK, 1000])
def test_the_inverse_by_blocks_is_the_inverse_over_all_tokens(num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 4, (300, num_tokens), generator=generator).double()
    weights[:, num_tokens // 2] += 1.0
    u = torch.rand(300, generator=generator).double()
    cdf = BlockCDF.of(weights)
    for row, share, token, mass in zip(weights, u, cdf.inverse(u), cdf.mass_n, strict=True):
        # Small whole numbers add up without rounding, so the two agree exactly.
        total = row.sum()
        assert mass == total
        assert token == int((row.cumsum(0) <= share * total).sum())


@pytest.mark.parametrize("u", [2.0**-53, 1.0 - 2.0**-53])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_token_of_weight_0_is_drawn_at_the_ends(u, dtype):
    weights = torch.zeros(2, 3 * BLOCK, dtype=dtype)
    weights[0, BLOCK + 3 : BLOCK + 90] = 0.1
    weights[1, [0, -1]] = 1e-30
    drawn = BlockCDF.of(weights).inverse(torch.full((2,), u, dtype=torch.float64))
    assert drawn.tolist() == ([BLOCK + 3, 0] if u < 0.5 else [BLOCK + 89, 3 * BLOCK - 1])


def test_greedy_takes_the_likeliest_at_temperature_one():
    logits = torch.tensor([0.0, 2.0, 1.0], dtype=torch.float64)
    drawn = draw_many(logits, 5, temperature=0.0, top_p=0.5)
    assert drawn.token_ids_n.tolist() == [1] * 5
    assert drawn.behave_n.tolist() == [0.0] * 5
    torch.testing.assert_close(drawn.full_n, torch.log_softmax(logits, -1)[1].expand(5))


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-46, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tiny_temperature_takes_the_likeliest_with_certainty(dtype, temperature):
    rows = replace(rows_of(5), temperature_n=torch.full((5,), temperature, dtype=torch.float64))
    logits = torch.tensor([30.0, 31.0, -5.0], dtype=dtype).expand(5, -1)
    drawn = draw(logits, rows, positions_n=torch.zeros(5, dtype=torch.int64))
    assert drawn.token_ids_n.tolist() == [1] * 5
    assert drawn.full_n.tolist() == [0.0] * 5


def test_a_top_k_larger_than_any_tensor_can_say_is_no_limit():
    request = Request(
        prompt_ids=(0,),
        sampling=Sampling(max_tokens=1),
        sample_id=SampleId(prompt_uid="p", index=0),
        seed=0,
    )
    object.__setattr__(request.sampling, "top_k", 2**64)
    rows, logits = SamplingRows.of([request], device=CPU), torch.randn(1, 9)
    limited = draw(logits, rows, positions_n=torch.zeros(1, dtype=torch.int64))
    free = draw(logits, rows_of(1), positions_n=torch.zeros(1, dtype=torch.int64))
    assert torch.equal(limited.token_ids_n, free.token_ids_n)
    torch.testing.assert_close(limited.behave_n, free.behave_n)


def test_drawing_leaves_the_logits_alone():
    logits = torch.randn(3, 9)
    before = logits.clone()
    draw(logits, rows_of(3, temperature=0.5), positions_n=torch.zeros(3, dtype=torch.int64))
    assert torch.equal(logits, before)
