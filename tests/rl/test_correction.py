"""Correction weights: what they multiply, where they are cut, and what they do not see."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from shardloop.config import CorrectionKind, CorrectionMode
from shardloop.engines.sampling import Drawn, SamplingRows, draw
from shardloop.errors import UsageError
from shardloop.head import token_logprobs
from shardloop.rl.correction import Correction, correction_weights
from shardloop.types import Request, SampleId, Sampling

OFFSETS = torch.tensor([0, 3, 4, 7])
MASK = torch.tensor([False, True, True, False, False, True, False])


def weights_of_row(
    gap_T: Tensor,
    *,
    kind: CorrectionKind,
    mode: CorrectionMode = "truncate",
    cap: float = math.inf,
    floor: float = 0.0,
) -> Correction:
    num_tokens = len(gap_T)
    return correction_weights(
        gap_T,
        torch.zeros_like(gap_T),
        kind=kind,
        mode=mode,
        cap=cap,
        floor=floor,
        mask_N=torch.ones(num_tokens, dtype=torch.bool),
        offsets=torch.tensor([0, num_tokens]),
    )


def slow_weights(
    gap_N: Tensor, kind: CorrectionKind, mode: CorrectionMode, cap: float, floor: float
) -> list[float]:
    weights = [0.0] * len(gap_N)
    for start, stop in pairwise(OFFSETS.tolist()):
        tokens = [token for token in range(start, stop) if MASK[token]]
        for token in tokens:
            row = [gap_N[other].item() for other in tokens]
            log_ratio = {
                "none": 0.0,
                "token": gap_N[token].item(),
                "sequence": sum(row),
                "geometric": sum(row) / len(row),
            }[kind]
            weight = math.exp(log_ratio)
            if mode == "truncate":
                weights[token] = min(weight, cap)
            else:
                weights[token] = weight if floor <= weight <= cap else 0.0
    return weights


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["none", "token", "sequence", "geometric"])
@pytest.mark.parametrize(("mode", "floor"), [("truncate", 0.0), ("mask", 0.0), ("mask", 0.6)])
def test_weights_equal_the_slow_formula(
    seed: int, kind: CorrectionKind, mode: CorrectionMode, floor: float
) -> None:
    old_N, engine_N = torch.randn(
        2, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    correction = correction_weights(
        old_N,
        engine_N,
        kind=kind,
        mode=mode,
        cap=1.5,
        floor=floor,
        mask_N=MASK,
        offsets=OFFSETS,
    )
    expected = slow_weights(old_N - engine_N, kind, mode, 1.5, floor)
    assert correction.weights_N.tolist() == pytest.approx(expected)


def test_masking_drops_what_is_out_of_bounds_and_leaves_the_rest_untouched() -> None:
    gap_T = torch.tensor([0.3, 0.8, 1.0, 5.0], dtype=torch.float64).log()
    cut = weights_of_row(gap_T, kind="token", cap=2.0)
    assert cut.weights_N.tolist() == pytest.approx([0.3, 0.8, 1.0, 2.0])
    assert cut.cut_fraction == 0.25
    masked = weights_of_row(gap_T, kind="token", mode="mask", cap=2.0, floor=0.5)
    assert masked.weights_N.tolist() == pytest.approx([0.0, 0.8, 1.0, 0.0])
    assert masked.cut_fraction == 0.5
    assert masked.ess == pytest.approx(1.8**2 / (4 * (0.8**2 + 1.0)))


def test_a_sequence_is_masked_as_a_whole() -> None:
    gap_T = torch.tensor([0.6, 0.6, -0.1])
    row = weights_of_row(gap_T, kind="sequence", mode="mask", cap=2.0, floor=0.5)
    assert (row.weights_N.tolist(), row.cut_fraction, row.ess) == ([0.0] * 3, 1.0, 0.0)
    mean = weights_of_row(gap_T, kind="geometric", mode="mask", cap=2.0, floor=0.5)
    assert mean.weights_N.tolist() == pytest.approx([math.exp(1.1 / 3)] * 3)


def test_sequence_is_the_product_and_geometric_the_mean() -> None:
    gap_T = torch.full((200,), 0.01, dtype=torch.float64)
    assert weights_of_row(gap_T, kind="sequence").weights_N[0].item() == pytest.approx(7.389, 1e-4)
    assert weights_of_row(gap_T, kind="geometric").weights_N[0].item() == pytest.approx(
        1.0101, 1e-4
    )


def sample_and_score(
    logits_nV: Tensor, *, temperature: float, scored_at: float | None = None, top_p: float = 1.0
) -> tuple[Drawn, Tensor]:
    """Tokens by the engine's sampler, and their log-probs by the trainer's head."""
    sampling = Sampling(max_tokens=1, temperature=temperature, top_p=top_p)
    requests = [
        Request(
            prompt_ids=(0,),
            sampling=sampling,
            sample_id=SampleId(prompt_uid="p", index=index),
            seed=0,
        )
        for index in range(len(logits_nV))
    ]
    rows = SamplingRows.of(requests, device=torch.device("cpu"))
    drawn = draw(logits_nV, rows, positions_n=torch.zeros(len(requests), dtype=torch.int64))
    head_VV = torch.eye(logits_nV.shape[1], dtype=logits_nV.dtype)
    old_n, _ = token_logprobs(
        logits_nV, head_VV, drawn.token_ids_n, temperature=scored_at or temperature
    )
    return drawn, old_n.double()


def test_one_temperature_on_both_sides_gives_ratio_one() -> None:
    logits_nV = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64).expand(50, -1)
    drawn, old_n = sample_and_score(logits_nV, temperature=0.6)
    good = weights_of_row(old_n - drawn.full_n, kind="token").weights_N
    torch.testing.assert_close(good, torch.ones_like(good), rtol=0, atol=1e-14)
    drawn, old_n = sample_and_score(logits_nV, temperature=1.0, scored_at=0.6)
    bug = weights_of_row(old_n - drawn.full_n, kind="token").weights_N
    assert bug[drawn.token_ids_n == 0][0].item() == pytest.approx(1.2276, abs=5e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.1])
@pytest.mark.parametrize("common", [0.0, 25.0])
def test_the_gap_of_equal_logits_is_rounding_even_at_a_low_temperature(
    seed: int, common: float, temperature: float
) -> None:
    logits_nV = torch.randn(2000, 200) * 4 + common
    drawn, old_n = sample_and_score(logits_nV, temperature=temperature)
    assert (old_n - drawn.full_n).abs().max() < 3e-6


def test_full_logprobs_give_one_and_renormalised_ones_the_kept_mass() -> None:
    logits_nV = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log().expand(100, -1)
    drawn, old_n = sample_and_score(logits_nV, temperature=1.0, top_p=0.8)
    assert set(drawn.token_ids_n.tolist()) == {0, 1}
    good = weights_of_row(old_n - drawn.full_n, kind="token").weights_N
    torch.testing.assert_close(good, torch.ones_like(good), rtol=0, atol=1e-14)
    cut = weights_of_row(old_n - drawn.behave_n, kind="token").weights_N
    torch.testing.assert_close(cut, torch.full_like(cut, 0.8), rtol=0, atol=1e-14)
    row = weights_of_row(old_n - drawn.behave_n, kind="sequence")
    assert row.weights_N[0].item() == pytest.approx(2.0e-10, rel=0.02)


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_weights_never_exceed_the_cap_and_overflow_is_no_exception(kind: CorrectionKind) -> None:
    correction = weights_of_row(torch.tensor([500.0, 0.0, -500.0, 300.0]), kind=kind, cap=2.0)
    assert correction.weights_N.max().item() == 2.0
    assert correction.cut_fraction == (0.5 if kind == "token" else 1.0)


def test_masked_values_change_nothing() -> None:
    old_N, engine_N = torch.randn(2, 7, generator=torch.Generator().manual_seed(0))
    poisoned_N = torch.where(MASK, engine_N, torch.nan)
    bounds = {"mode": "truncate", "cap": 2.0, "floor": 0.0}
    arguments = {"kind": "sequence", **bounds, "mask_N": MASK, "offsets": OFFSETS}
    clean = correction_weights(old_N, engine_N, **arguments)  # type: ignore[arg-type]
    dirty = correction_weights(old_N, poisoned_N, **arguments)  # type: ignore[arg-type]
    assert torch.equal(clean.weights_N, dirty.weights_N)
    assert (clean.ess, clean.gap_mean, clean.gap_max) == (dirty.ess, dirty.gap_mean, dirty.gap_max)


def test_effective_share_is_one_for_equal_weights_and_one_in_k_for_a_lone_one() -> None:
    assert weights_of_row(torch.full((8,), 0.3), kind="token").ess == pytest.approx(1.0)
    lone = torch.tensor([0.0] + [-50.0] * 7)
    assert weights_of_row(lone, kind="token").ess == pytest.approx(1 / 8)
    tiny = weights_of_row(torch.full((8,), -1000.0), kind="token")
    assert tiny.weights_N.max().item() == 0.0
    assert tiny.ess == pytest.approx(1.0)


def test_gradients_do_not_flow_through_weights() -> None:
    old_T = torch.zeros(3, requires_grad=True)
    assert not weights_of_row(old_T, kind="token").weights_N.requires_grad


def test_no_loss_tokens_give_zero_weights_and_finite_numbers() -> None:
    correction = correction_weights(
        torch.ones(7),
        torch.zeros(7),
        kind="sequence",
        mode="truncate",
        cap=2.0,
        floor=0.0,
        mask_N=torch.zeros(7, dtype=torch.bool),
        offsets=OFFSETS,
    )
    assert correction.weights_N.tolist() == [0.0] * 7
    assert (correction.ess, correction.gap_mean, correction.gap_max) == (1.0, 0.0, 0.0)


def test_bad_arguments_are_refused() -> None:
    gap_T = torch.zeros(3)
    with pytest.raises(UsageError, match="choose none, token, sequence or geometric"):
        weights_of_row(gap_T, kind="mean")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"cap=0\.5; choose 1 or more"):
        weights_of_row(gap_T, kind="token", cap=0.5)
    with pytest.raises(UsageError, match="choose truncate or mask"):
        weights_of_row(gap_T, kind="token", mode="clip")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"floor=0\.5; choose 0 to 1 with mode mask, 0 with"):
        weights_of_row(gap_T, kind="token", floor=0.5)
    with pytest.raises(UsageError, match="NaN or infinite"):
        weights_of_row(torch.tensor([0.0, torch.nan]), kind="token")
