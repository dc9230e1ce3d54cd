"""From judged groups to loss and gradient, against lists: each setting beside any others."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardloop.config import TrainConfig
from shardloop.controller.batches import has_signal, make_step_batch
from shardloop.controller.rounds import Group, penalties
from shardloop.micro_batches import Share, needs_silent_rows, without_silent_rows
from shardloop.objective import grpo_objective
from shardloop.rl.batch import Batch
from tests.controller.test_batches import SAMPLES, config, random_groups, rows, whole_batch

CHOICES: dict[str, list[dict[str, Any]]] = {
    "loss": [{"loss": "ppo"}, {"dual_clip": 1.3}, {"loss": "gspo"}, {"loss": "cispo"}],
    "aggregation": [
        {"aggregation": kind}
        for kind in ("token-mean", "sequence-mean", "sequence-sum", "prompt-mean")
    ],
    "correction": [
        {"correction": "none"},
        *({"correction": kind} for kind in ("token", "sequence", "geometric")),
        *(
            {"correction": kind, "correction_mode": "mask", "correction_floor": 0.5}
            for kind in ("token", "sequence", "geometric")
        ),
    ],
    "overlong": [{}, {"overlong": "mask"}, {"overlong": "penalty", "overlong_buffer": 3}],
    "kl": [
        {},
        *(
            {"kl_coef": 0.3, "kl_in": place, "kl_estimator": kind}
            for place in ("loss", "reward")
            for kind in ("k1", "k2", "k3")
        ),
    ],
    "advantage": [
        *({"std": std} for std in ("sample", "population", "none")),
        {"advantage": "rloo"},
        {"advantage": "reinforce++"},
    ],
}
SPLITS = [(1, 1000, 100), (2, 8, 1), (3, 12, 2)]
"""Places, tokens of a row, rows of a micro-batch."""


@pytest.mark.parametrize("seed", range(60))
def test_loss_and_gradient_are_those_of_lists_at_any_split(seed: int) -> None:
    rng = random.Random(seed)
    chosen: dict[str, Any] = {}
    for choices in CHOICES.values():
        chosen |= rng.choice(choices)
    settings = config(**chosen)
    groups = some_groups(rng, settings)
    if make_step_batch(groups, settings).num_loss_tokens == 0:
        return
    batch = whole_batch(groups, settings, seed)
    assert batch.old_N is not None
    noise_N = torch.randn(
        len(batch.old_N), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    new_N = batch.old_N + 0.4 * noise_N
    expected = slow_objective(groups, batch, new_N, settings)
    for places, row_tokens, rows_per_micro_batch in SPLITS:
        shares = [
            Share(
                place=place,
                num_places=places,
                row_tokens=row_tokens,
                rows_per_micro_batch=rows_per_micro_batch,
                multiple=1,
            )
            for place in range(places)
        ]
        found = objective(batch, shares, new_N, settings)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, msg=str(chosen))
    if not has_signal(batch, settings.grpo):
        assert not expected[1].any()


def some_groups(rng: random.Random, settings: TrainConfig) -> list[Group]:
    """Among them, sometimes, one of equal rewards and one that is cut off whole."""
    groups = random_groups(rng.randrange(10**6))
    if rng.random() < 0.3:
        groups[1] = random_groups(rng.randrange(10**6), reward=0.35)[1]
    if rng.random() < 0.3:
        rollout = groups[0].rollout
        cut_off = tuple(replace(c, finish_reason="length") for c in rollout.completions)
        groups[0] = replace(groups[0], rollout=replace(rollout, completions=cut_off))
    return [replace(g, shaped_G=g.shaped_G + penalties(g.rollout, settings)) for g in groups]


def objective(
    batch: Batch, shares: list[Share], new_N: Tensor, settings: TrainConfig
) -> tuple[Tensor, Tensor]:
    """As the trainer's ranks compute it together."""
    new_N = new_N.clone().requires_grad_()
    micro_batches = [packed for share in shares for packed in share.with_signal(batch)]
    if needs_silent_rows(settings.grpo):
        micro_batches += [packed for share in shares for packed in share.silent(batch)]
    else:
        batch = without_silent_rows(batch)
    total = torch.zeros((), dtype=torch.float64)
    for packed in micro_batches:
        new_n = new_N[packed.flat_index_n]
        part, _ = grpo_objective(new_n, torch.zeros_like(new_n), batch, packed, settings.grpo)
        total = total + part
    return total.detach(), torch.autograd.grad(total, new_N, materialize_grads=True)[0]


def slow_objective(
    groups: list[Group], batch: Batch, new_N: Tensor, settings: TrainConfig
) -> tuple[Tensor, Tensor]:
    """Row by row and token by token; takes from the batch log-probs and nothing else."""
    grpo, new_N = settings.grpo, new_N.clone().requires_grad_()
    assert batch.old_N is not None and batch.full_N is not None
    old, engine = rows(batch.old_N, batch), rows(batch.full_N, batch)
    ref = rows(batch.old_N if batch.ref_N is None else batch.ref_N, batch)
    ends = itertools.pairwise(batch.offsets.tolist())
    new = [new_N[a:b][batch.loss_mask_N[a:b]] for a, b in ends]
    lengths = [len(row) for row in old]
    advantages = slow_advantages(groups, old, ref, settings)
    total = torch.zeros((), dtype=torch.float64)
    for b, length in enumerate(lengths):
        for t in range(length):
            gap = [o - e for o, e in zip(old[b], engine[b], strict=True)]
            loss = slow_loss(new[b], old[b], t, advantages[b], settings)
            kl = slow_kl(new[b][t] - ref[b][t], grpo.kl_kind)
            kl_coef = grpo.kl_coef if grpo.kl_in == "loss" else 0.0
            term = slow_weight(gap, t, settings) * loss + kl_coef * kl
            total = total + slow_scale(lengths, b, settings) * term
    return total.detach(), torch.autograd.grad(total, new_N, materialize_grads=True)[0]


def slow_kl(d: Any, kind: str) -> Any:
    power = torch.exp(-d) if isinstance(d, Tensor) else math.exp(-d)
    return {"k1": d, "k2": d * d / 2, "k3": power - 1 + d}[kind]


def slow_advantages(
    groups: list[Group], old: list[list[float]], ref: list[list[float]], settings: TrainConfig
) -> list[float]:
    grpo = settings.grpo
    rewards = [reward for group in groups for reward in group.shaped_G.tolist()]
    if grpo.kl_in == "reward":
        for b in range(len(rewards)):
            gaps = [o - r for o, r in zip(old[b], ref[b], strict=True)]
            rewards[b] -= grpo.kl_coef * sum(slow_kl(gap, grpo.kl_kind) for gap in gaps)
    found: list[float] = []
    is_flat: list[bool] = []
    for start in range(0, len(rewards), SAMPLES):
        group = rewards[start : start + SAMPLES]
        mean = sum(group) / SAMPLES
        centred = [0.0] * SAMPLES if len(set(group)) == 1 else [r - mean for r in group]
        squares = sum(c * c for c in centred)
        if grpo.advantage == "rloo":
            centred = [c * SAMPLES / (SAMPLES - 1) for c in centred]
        elif grpo.advantage == "grpo" and grpo.std != "none":
            std = math.sqrt(squares / (SAMPLES - (grpo.std == "sample")))
            centred = [c / (std + 1e-6) for c in centred]
        found += centred
        is_flat += [len(set(group)) == 1] * SAMPLES
    if grpo.advantage != "reinforce++":
        return found
    tokens = [value for value, row in zip(found, old, strict=True) for _ in row]
    if len(set(tokens)) == 1:
        return [0.0] * len(found)
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((value - mean) ** 2 for value in tokens) / (len(tokens) - 1))
    return [
        0.0 if flat else (value - mean) / (std + 1e-6)
        for value, flat in zip(found, is_flat, strict=True)
    ]


def slow_weight(gap: list[float], t: int, settings: TrainConfig) -> float:
    grpo = settings.grpo
    log_ratio = {
        "none": 0.0,
        "token": gap[t],
        "sequence": sum(gap),
        "geometric": sum(gap) / len(gap),
    }[grpo.correction]
    weight = math.exp(log_ratio)
    if grpo.correction_mode == "truncate":
        return min(weight, grpo.correction_cap)
    return weight if grpo.correction_floor <= weight <= grpo.correction_cap else 0.0


def slow_scale(lengths: list[int], b: int, settings: TrainConfig) -> float:
    place = b // SAMPLES
    prompts = [sum(lengths[p : p + SAMPLES]) for p in range(0, len(lengths), SAMPLES)]
    num_rows, num_prompts = sum(n > 0 for n in lengths), sum(n > 0 for n in prompts)
    return {
        "token-mean": 1 / sum(lengths),
        "sequence-mean": 1 / (num_rows * lengths[b]),
        "sequence-sum": 1 / (num_rows * settings.sampling.max_tokens),
        "prompt-mean": 1 / (num_prompts * prompts[place]),
    }[settings.grpo.aggregation]


def slow_loss(
    new_T: Tensor, old: list[float], t: int, advantage: float, settings: TrainConfig
) -> Tensor:
    grpo = settings.grpo
    log_ratio_T = new_T - torch.tensor(old, dtype=torch.float64)
    low, high = 1 - grpo.clip_low, 1 + grpo.clip_high
    if grpo.loss == "cispo":
        return -log_ratio_T[t].exp().detach().clamp(low, high) * advantage * new_T[t]
    ratio = log_ratio_T[t].exp()
    if grpo.loss == "gspo":
        ratio = log_ratio_T.mean().exp().detach() * (new_T[t] - new_T[t].detach()).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    if grpo.dual_clip is not None and advantage < 0 and loss.item() > -grpo.dual_clip * advantage:
        return torch.tensor(-grpo.dual_clip * advantage, dtype=torch.float64)
    return loss
