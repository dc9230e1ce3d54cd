"""What a step trains on: KL off the reward, scales of the whole batch, overlong completions."""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardloop.config import GRPOConfig, SamplingConfig, TrainConfig, TrainerConfig
from shardloop.controller.batches import (
    add_advantages,
    has_signal,
    kl_of_rows,
    make_step_batch,
    recompute,
)
from shardloop.controller.rollouts import Rollout
from shardloop.controller.rounds import Group
from shardloop.rl.advantages import group_advantages
from shardloop.rl.batch import Batch
from shardloop.types import Completion, Prompt, Request, SampleId, Sampling
from tests.controller.fakes import InProcessGroup, RowEngine
from tests.controller.test_loop import CONFIG, World

SEEDS = range(4)
SAMPLES = 3


def random_groups(seed: int, *, num_groups: int = 4, reward: float | None = None) -> list[Group]:
    """Completions of 1 to 6 tokens, some of them another's (tool output), some cut off."""
    rng = random.Random(seed)
    groups = []
    for place in range(num_groups):
        completions = tuple(_completion(rng, place, index) for index in range(SAMPLES))
        rewards = [rng.choice([0.0, 0.5, 1.0]) if reward is None else reward for _ in completions]
        rollout = Rollout(
            prompt=Prompt(uid=str(place), text="1"),
            completions=completions,
            env_rewards=(None,) * SAMPLES,
        )
        shaped_G = torch.tensor(rewards, dtype=torch.float64)
        groups.append(Group(rollout=rollout, samples=(), shaped_G=shaped_G))
    return groups


def _completion(rng: random.Random, place: int, index: int) -> Completion:
    length = rng.randint(1, 6)
    full = tuple(-rng.random() for _ in range(length))
    return Completion(
        request=Request(
            prompt_ids=tuple(rng.choices(range(5), k=rng.randint(1, 4))),
            sampling=Sampling(max_tokens=6),
            sample_id=SampleId(prompt_uid=str(place), index=index),
            seed=0,
        ),
        token_ids_T=tuple(rng.choices(range(5), k=length)),
        behave_T=full,
        full_T=full,
        version_T=(0,) * length,
        loss_mask_T=(1, *(int(rng.random() < 0.7) for _ in range(length - 1))),
        finish_reason=rng.choice(["stop", "length"]),
    )


class Scorer:
    """A trainer whose log-probs are random numbers, 0 outside the loss mask."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def logprobs(self, batch: Batch, *, policy: str = "current") -> Tensor:
        generator = torch.Generator().manual_seed(self._seed + len(policy))
        values_N = -torch.rand(len(batch.token_ids_N), dtype=torch.float64, generator=generator)
        return values_N * batch.loss_mask_N


def config(**grpo: Any) -> TrainConfig:
    return TrainConfig(
        grpo=GRPOConfig(prompts_per_step=4, samples_per_prompt=SAMPLES, **grpo),
        sampling=SamplingConfig(max_tokens=6),
        trainer=TrainerConfig(dtype="float64"),
    )


def whole_batch(groups: list[Group], config: TrainConfig, seed: int) -> Batch:
    batch, _ = recompute(
        InProcessGroup(Scorer(seed)),  # type: ignore[arg-type]
        make_step_batch(groups, config),
        config.grpo,
    )
    return add_advantages(batch, groups, config.grpo)


def rows(values_N: Tensor, batch: Batch) -> list[list[float]]:
    """One list per row, of its loss tokens."""
    ends = itertools.pairwise(batch.offsets.tolist())
    return [values_N[a:b][batch.loss_mask_N[a:b]].tolist() for a, b in ends]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("advantage", ["grpo", "rloo", "reinforce++"])
def test_kl_in_the_reward_comes_off_before_the_group_is_compared(
    seed: int, estimator: Any, advantage: Any
) -> None:
    """Against a reference that goes through the tokens one by one."""
    settings = config(kl_coef=0.5, kl_in="reward", kl_estimator=estimator, advantage=advantage)
    groups = random_groups(seed)
    batch = whole_batch(groups, settings, seed)
    assert batch.old_N is not None and batch.ref_N is not None and batch.advantages_N is not None
    rewards = [reward for group in groups for reward in group.shaped_G.tolist()]
    old, ref = rows(batch.old_N, batch), rows(batch.ref_N, batch)
    for place, pairs in enumerate(zip(old, ref, strict=True)):
        for d in (o - r for o, r in zip(*pairs, strict=True)):
            kl = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
            rewards[place] -= 0.5 * kl
    expected_PG = group_advantages(
        advantage,
        torch.tensor(rewards, dtype=torch.float64).view(len(groups), SAMPLES),
        std="sample",
        num_tokens_PG=torch.tensor([len(row) for row in old]).view(len(groups), SAMPLES),
    )
    for row, advantage_b in zip(
        rows(batch.advantages_N, batch), expected_PG.flatten().tolist(), strict=True
    ):
        assert row == pytest.approx([advantage_b] * len(row), abs=1e-9)
    assert torch.count_nonzero(batch.advantages_N[~batch.loss_mask_N]) == 0


def test_kl_in_the_loss_leaves_the_rewards_alone() -> None:
    groups = random_groups(0)
    in_loss = whole_batch(groups, config(kl_coef=0.5), 0)
    without = whole_batch(groups, config(), 0)
    assert torch.equal(_advantages(in_loss), _advantages(without))
    assert in_loss.ref_N is not None and without.ref_N is None


def _advantages(batch: Batch) -> Tensor:
    assert batch.advantages_N is not None
    return batch.advantages_N


def test_kl_of_a_row_is_a_sum_over_the_tokens_that_the_policy_chose() -> None:
    settings = config(kl_coef=0.5, kl_in="reward", kl_estimator="k1")
    batch = whole_batch(random_groups(1), settings, 1)
    assert batch.old_N is not None and batch.ref_N is not None
    expected = [sum(row) for row in rows(batch.old_N - batch.ref_N, batch)]
    assert kl_of_rows(batch, settings.grpo).tolist() == pytest.approx(expected)
    other = torch.where(batch.loss_mask_N, batch.old_N, 9.0)
    moved = kl_of_rows(replace(batch, old_N=other), settings.grpo)
    assert moved.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kind", ["token-mean", "sequence-mean", "sequence-sum", "prompt-mean", "sequence-sum by 3"]
)
def test_the_loss_of_a_batch_is_the_mean_that_the_setting_names(seed: int, kind: str) -> None:
    """Against lists: the scales are the whole batch's, prompts are those of the groups."""
    name, _, constant = kind.partition(" by ")
    settings = config(aggregation=name, aggregation_constant=int(constant) if constant else None)
    batch = make_step_batch(random_groups(seed), settings)
    generator = torch.Generator().manual_seed(seed)
    loss_N = torch.rand(len(batch.token_ids_N), dtype=torch.float64, generator=generator)
    assert batch.scale_N is not None
    lists = rows(loss_N, batch)
    prompts = [_joined(lists[p : p + SAMPLES]) for p in range(0, len(lists), SAMPLES)]
    expected = {
        "token-mean": _mean(_joined(lists)),
        "sequence-mean": _mean([_mean(row) for row in lists]),
        "sequence-sum": _mean([sum(row) / int(constant or 6) for row in lists]),
        "prompt-mean": _mean([_mean(prompt) for prompt in prompts]),
    }[name]
    assert float((batch.scale_N * loss_N).sum()) == pytest.approx(expected)


def _joined(lists: list[list[float]]) -> list[float]:
    return list(itertools.chain.from_iterable(lists))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize("seed", SEEDS)
def test_masked_overlong_completions_teach_nothing_and_their_rewards_still_count(
    seed: int,
) -> None:
    groups = random_groups(seed)
    kept = whole_batch(groups, config(), seed)
    masked = whole_batch(groups, config(overlong="mask"), seed)
    completions = [c for group in groups for c in group.rollout.completions]
    pairs = zip(
        completions, rows(_advantages(kept), kept), rows(_advantages(masked), masked), strict=True
    )
    for completion, before, after in pairs:
        assert after == ([] if completion.finish_reason == "length" else before)
    assert torch.equal(kept.token_ids_N, masked.token_ids_N)


def test_a_batch_without_any_loss_token_makes_no_update_and_no_nan() -> None:
    def cut_off(completion: Completion) -> Completion:
        return replace(completion, finish_reason="length")

    world = World(RowEngine(cut_off))
    grpo = replace(CONFIG.grpo, overlong="mask", kl_coef=0.1, entropy_coef=0.1)
    steps = world.run(replace(CONFIG, grpo=grpo))
    assert [step.metrics["update"] for step in steps] == [0] * 6
    assert world.trainer.version == 0 and "logprobs" not in world.trainer_group.calls
    numbers = [v for step in steps for v in step.metrics.values() if isinstance(v, float)]
    assert all(math.isfinite(value) for value in numbers)


def test_a_batch_has_signal_where_its_loss_can_have_a_gradient() -> None:
    flat, graded = random_groups(0, reward=0.5), random_groups(0)
    for groups, settings, expected in (
        (graded, config(), True),
        (flat, config(), False),
        (flat, config(kl_coef=0.1), True),
        (flat, config(kl_coef=0.1, kl_in="reward"), True),  # completions differ in their KL
        (flat, config(entropy_coef=0.1), True),
    ):
        batch = whole_batch(groups, settings, 0)
        assert has_signal(batch, settings.grpo) == expected, settings.grpo


def test_kl_in_the_reward_without_any_kl_yet_is_no_signal() -> None:
    """At the start both policies are one."""
    world = World()
    grpo = replace(CONFIG.grpo, kl_coef=0.1, kl_in="reward")
    [step] = world.run(
        replace(CONFIG, steps=1, grpo=grpo), reward=lambda prompt, text, *, finished: 0.5
    )
    assert (step.metrics["kl"], step.metrics["update"]) == (0.0, 0)


def test_masking_correction_reports_what_it_cut() -> None:
    settings = config(correction_mode="mask", correction_cap=1.2, correction_floor=0.8)
    batch, metrics = recompute(
        InProcessGroup(Scorer(0)),  # type: ignore[arg-type]
        make_step_batch(random_groups(0), settings),
        settings.grpo,
    )
    assert batch.weights_N is not None and batch.old_N is not None and batch.full_N is not None
    ratios = (batch.old_N - batch.full_N)[batch.loss_mask_N].exp()
    inside = (ratios >= 0.8) & (ratios <= 1.2)
    torch.testing.assert_close(batch.weights_N[batch.loss_mask_N], ratios * inside)
    assert metrics["cut_fraction"] == pytest.approx(1 - float(inside.double().mean()))
    assert 0.0 < metrics["cut_fraction"] < 1.0


def test_where_the_correction_masks_out_every_advantage_no_step_is_made() -> None:
    """AdamW would move the weights on a gradient of 0."""
    settings = config(correction_mode="mask", correction_floor=0.5)
    groups = random_groups(0)
    batch = whole_batch(groups, settings, 0)
    assert has_signal(batch, settings.grpo)
    assert batch.weights_N is not None
    silent = replace(batch, weights_N=torch.zeros_like(batch.weights_N))
    assert not has_signal(silent, settings.grpo)
    assert has_signal(silent, replace(settings.grpo, kl_coef=0.1)), "a KL term is not corrected"

    far = RowEngine(lambda c: replace(c, full_T=tuple(v - 5.0 for v in c.full_T)))
    world = World(far)
    grpo = replace(CONFIG.grpo, correction_mode="mask")
    steps = world.run(replace(CONFIG, grpo=grpo))
    assert [step.metrics["update"] for step in steps] == [0] * 6
    assert [step.metrics["cut_fraction"] for step in steps] == [1.0] * 6
    assert "step" not in world.trainer_group.calls
