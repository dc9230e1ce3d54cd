"""Every named convention on one worked example: formula, value, gradient. Floor 1.

Called by `scripts/write_conventions.py`, which writes docs/conventions.md, and by whoever wants the
numbers. Nothing is typed in: each value is what the library's own function returns.

Shapes: P prompts · G samples per prompt · B rows · n loss tokens of all rows · V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from shardloop.config import (
    AdvantageKind,
    Aggregation,
    CorrectionKind,
    CorrectionMode,
    KLPlace,
    Std,
)
from shardloop.rl.advantages import group_advantages
from shardloop.rl.aggregation import token_scales
from shardloop.rl.correction import correction_weights
from shardloop.rl.kl import KL_ESTIMATORS
from shardloop.rl.losses import TokenLoss, cispo_loss, gspo_loss, ppo_clip_loss
from shardloop.rl.overlong import overlong_penalty

Numbers = tuple[float, ...]

REWARDS_PG = ((1.0, 0.0), (0.8, 0.2))
LENGTHS_B = (2, 3, 1, 2)
"""Tokens of each sample; the samples of the first prompt come first."""
ENGINE_n = (0.15, 0.40, 0.20, 0.24, 0.40, 0.20, 0.50, 0.30)
"""Probability of each token where it was sampled."""
OLD_n = (0.20, 0.50, 0.05, 0.60, 0.40, 0.50, 0.50, 0.10)
"""By the trainer before the update."""
NEW_n = (0.40, 0.55, 0.50, 0.30, 0.44, 0.25, 0.45, 0.40)
"""By the policy being trained."""
CLIP_LOW, CLIP_HIGH, DUAL_CLIP = 0.2, 0.2, 3.0
CAP, FLOOR = 2.0, 0.5
CONSTANT, MAX_TOKENS, BUFFER = 3, 3, 2
LOGITS_V = (0.5, -0.2, 0.1)
"""Of a policy over three tokens, for the KL."""
REF_LOGITS_V = (0.0, 0.3, -0.4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    topic: str
    """advantage, loss, aggregation, kl, correction or overlong."""
    name: str
    """The settings of `GRPOConfig` that choose it."""
    formula: str
    value: Numbers
    """One number, or one for each sample or token."""
    gradient: Numbers | None
    """Of the value (of each token's own, where there is one for each) with respect to each token's
    new log-prob, or to the three logits for kl; None for what enters the loss as a constant."""


def conventions() -> list[Convention]:
    """All of them, topic by topic."""
    return [*_advantages(), *_losses(), *_aggregations(), *_kls(), *_corrections(), *_overlong()]


def _advantages() -> Iterator[Convention]:
    def convention(kind: AdvantageKind, std: Std, name: str, formula: str) -> Convention:
        advantages_PG = group_advantages(
            kind,
            torch.tensor(REWARDS_PG, dtype=torch.float64),
            std=std,
            num_tokens_PG=torch.tensor(LENGTHS_B).view(len(REWARDS_PG), -1),
        )
        value = _numbers(advantages_PG)
        return Convention(topic="advantage", name=name, formula=formula, value=value, gradient=None)

    formulas: dict[Std, str] = {
        "sample": "(reward − mean of the group) / std of the group (ddof 1)",
        "population": "(reward − mean of the group) / std of the group (ddof 0)",
        "none": "reward − mean of the group",
    }
    for std, formula in formulas.items():
        yield convention("grpo", std, f"advantage=grpo, std={std}", formula)
    text = "reward − mean of the group's other samples"
    yield convention("rloo", "sample", "advantage=rloo", text)
    text = "c = reward − mean of the group; (c − mean) / std over all tokens of the batch (ddof 1)"
    yield convention("reinforce++", "sample", "advantage=reinforce++", text)


def _losses() -> Iterator[Convention]:
    clips = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
    row_n = torch.arange(len(LENGTHS_B)).repeat_interleave(torch.tensor(LENGTHS_B))

    def convention(name: str, formula: str, tokens: TokenLoss, new_n: Tensor) -> Convention:
        (gradient_n,) = torch.autograd.grad(tokens.loss_n.sum(), new_n)
        return Convention(
            topic="loss",
            name=name,
            formula=formula,
            value=_numbers(tokens.loss_n),
            gradient=_numbers(gradient_n),
        )

    new_n, old_n, advantages_n = _tokens()
    ppo = "−min(r A, clip(r, 1 − clip_low, 1 + clip_high) A)"
    yield convention("loss=ppo", ppo, ppo_clip_loss(new_n, old_n, advantages_n, **clips), new_n)
    tokens = ppo_clip_loss(new_n, old_n, advantages_n, **clips, dual_clip=DUAL_CLIP)
    name = f"loss=ppo, dual_clip={DUAL_CLIP:g}"
    yield convention(name, "the same, where A < 0 at most dual_clip × −A", tokens, new_n)
    tokens = gspo_loss(new_n, old_n, advantages_n, row_n=row_n, **clips)
    yield convention("loss=gspo", "ppo with r = exp(mean of new − old over the row)", tokens, new_n)
    tokens = cispo_loss(new_n, old_n, advantages_n, **clips)
    text = "−sg[clip(r, 1 − clip_low, 1 + clip_high)] A new"
    yield convention("loss=cispo", text, tokens, new_n)


def _aggregations() -> Iterator[Convention]:
    formulas: dict[Aggregation, str] = {
        "token-mean": "Σ loss / tokens",
        "sequence-mean": "mean over rows of (mean over the row's tokens)",
        "prompt-mean": "mean over prompts of (mean over the tokens of all its rows)",
        "sequence-sum": "mean over rows of (Σ over the row's tokens / aggregation_constant)",
    }
    assert set(formulas) == set(get_args(Aggregation))
    offsets = torch.tensor((0, *LENGTHS_B)).cumsum(0)
    for kind, formula in formulas.items():
        new_n, old_n, advantages_n = _tokens()
        scale_n = token_scales(
            kind,
            mask_N=torch.ones(int(offsets[-1]), dtype=torch.bool),
            offsets=offsets,
            group_B=torch.arange(len(REWARDS_PG)).repeat_interleave(len(REWARDS_PG[0])),
            constant=CONSTANT if kind == "sequence-sum" else None,
        )
        tokens = ppo_clip_loss(
            new_n, old_n, advantages_n, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, dual_clip=DUAL_CLIP
        )
        loss = (scale_n * tokens.loss_n).sum()
        (gradient_n,) = torch.autograd.grad(loss, new_n)
        yield Convention(
            topic="aggregation",
            name=f"aggregation={kind}",
            formula=formula,
            value=_numbers(loss),
            gradient=_numbers(gradient_n),
        )


def _kls() -> Iterator[Convention]:
    formulas = {"k1": "new − ref", "k2": "(new − ref)² / 2", "k3": "exp(ref − new) − 1 − ref + new"}
    for place in get_args(KLPlace):
        for kind, estimator in KL_ESTIMATORS.items():
            logits_V = torch.tensor(LOGITS_V, dtype=torch.float64, requires_grad=True)
            new_V = logits_V.log_softmax(0)
            chance_V = new_V.detach().exp()
            ref_V = torch.tensor(REF_LOGITS_V, dtype=torch.float64).log_softmax(0)
            value_V = estimator(new_V, ref_V)
            slope_V = value_V if place == "loss" else value_V.detach() * new_V
            (gradient_V,) = torch.autograd.grad((chance_V * slope_V).sum(), logits_V)
            yield Convention(
                topic="kl",
                name=f"kl_in={place}, kl_estimator={kind}",
                formula=f"k = {formulas[kind]}; E[{'∇k' if place == 'loss' else 'k ∇new'}]",
                value=_numbers((chance_V * value_V).sum()),
                gradient=_numbers(gradient_V),
            )


def _corrections() -> Iterator[Convention]:
    formulas: dict[CorrectionKind, str] = {
        "token": "w = exp(old − engine) of the token",
        "sequence": "w = exp(Σ of old − engine over the row): the product of its ratios",
        "geometric": "w = exp(mean of old − engine over the row): their geometric mean",
    }
    bounds: dict[CorrectionMode, str] = {
        "truncate": "min(w, cap)",
        "mask": "w within [floor, cap], else 0",
    }
    offsets = torch.tensor((0, *LENGTHS_B)).cumsum(0)
    for kind, formula in formulas.items():
        for mode, bound in bounds.items():
            correction = correction_weights(
                torch.tensor(OLD_n, dtype=torch.float64).log(),
                torch.tensor(ENGINE_n, dtype=torch.float64).log(),
                kind=kind,
                mode=mode,
                cap=CAP,
                floor=FLOOR if mode == "mask" else 0.0,
                mask_N=torch.ones(int(offsets[-1]), dtype=torch.bool),
                offsets=offsets,
            )
            yield Convention(
                topic="correction",
                name=f"correction={kind}, correction_mode={mode}",
                formula=f"{formula}; {bound}",
                value=_numbers(correction.weights_N),
                gradient=None,
            )


def _overlong() -> Iterator[Convention]:
    penalty_B = overlong_penalty(torch.tensor(LENGTHS_B), max_tokens=MAX_TOKENS, buffer=BUFFER)
    yield Convention(
        topic="overlong",
        name=f"overlong=penalty, overlong_buffer={BUFFER}",
        formula="−(length − (max_tokens − buffer)) / buffer, within [−1, 0]",
        value=_numbers(penalty_B),
        gradient=None,
    )


def _tokens() -> tuple[Tensor, Tensor, Tensor]:
    """New log-probs with gradient, old ones, and advantage +1 or -1 of each token's sample."""
    new_n = torch.tensor(NEW_n, dtype=torch.float64).log().requires_grad_()
    advantages_PG = group_advantages(
        "rloo",
        torch.tensor(REWARDS_PG, dtype=torch.float64),
        std="sample",
        num_tokens_PG=torch.tensor(LENGTHS_B).view(len(REWARDS_PG), -1),
    )
    advantages_n = advantages_PG.sign().flatten().repeat_interleave(torch.tensor(LENGTHS_B))
    return new_n, torch.tensor(OLD_n, dtype=torch.float64).log(), advantages_n


def _numbers(values: Tensor) -> Numbers:
    return tuple(values.detach().flatten().tolist())
