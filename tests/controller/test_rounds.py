"""Dynamic sampling: rounds of prompts replace the groups that have nothing to teach."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardloop.config import GRPOConfig, SamplingConfig, TrainConfig
from shardloop.controller.rollouts import step_seed
from shardloop.controller.rounds import round_seed
from shardloop.types import Completion, Prompt
from tests.controller.fakes import RowEngine
from tests.controller.test_loop import CONFIG, World

ROUNDS = 3
SAMPLES = 4


def config(rounds: int = ROUNDS, **changes: Any) -> TrainConfig:
    grpo = replace(CONFIG.grpo, prompts_per_step=3, resample_rounds=rounds, **changes)
    return replace(CONFIG, grpo=grpo)


def rarely(prompt: Prompt, text: str, *, finished: bool) -> float:
    """Equal for all samples of most prompts."""
    luck = random.Random(prompt.uid).random()
    return text.count("a") + 0.1 * len(text) if luck < 0.35 else luck


def trained_uids(world: World, step: int) -> int:
    return len(world.trainer.batches[step].offsets) - 1


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_kept_by_rounds_until_there_are_enough(seed: int) -> None:
    """Against a slow reference that judges the groups one after the other."""
    world = World()
    steps = world.run(replace(config(), seed=seed), reward=rarely)
    place = 0
    for number, step in enumerate(steps):
        groups: dict[str, list[float]] = {}
        for sample in step.samples:
            groups.setdefault(sample.prompt.uid, []).append(sample.reward.value)
        first = number * (ROUNDS + 1) * 3
        expected = [f"{seed}/{first + i}" for i in range(3 * step.metrics["rounds"])]
        assert list(groups) == expected
        kept = [uid for uid, rewards in groups.items() if len(set(rewards)) > 1]
        assert step.metrics["groups_kept"] == min(3, len(kept))
        assert step.metrics["rounds"] == _rounds_needed([uid in kept for uid in groups])
        if kept:
            assert trained_uids(world, place) == min(3, len(kept)) * SAMPLES
            assert torch.count_nonzero(world.trainer.batches[place].advantages_N) > 0
            place += 1
        assert step.metrics["update"] == int(bool(kept))
    assert 1 < sum(step.metrics["rounds"] for step in steps) < len(steps) * (ROUNDS + 1)


def _rounds_needed(is_kept: list[bool]) -> int:
    for number in range(1, ROUNDS + 2):
        if sum(is_kept[: 3 * number]) >= 3:
            return number
    return ROUNDS + 1


def test_the_reward_is_that_of_all_sampled_groups_the_flat_ones_too() -> None:
    [step, *_] = World().run(config(), reward=rarely)
    rewards = [sample.reward.value for sample in step.samples]
    assert step.metrics["rounds"] > 1 and len(rewards) == step.metrics["rounds"] * 3 * SAMPLES
    assert step.metrics["reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert step.metrics["tokens"] == sum(sample.num_tokens for sample in step.samples)
    assert 0.0 < step.metrics["zero_signal_fraction"] < 1.0


def test_where_no_group_is_kept_no_update_is_made() -> None:
    world = World()
    steps = world.run(config(rounds=1), reward=lambda prompt, text, *, finished: 0.5)
    assert [step.metrics["update"] for step in steps] == [0] * 6
    assert [step.metrics["rounds"] for step in steps] == [2] * 6
    assert [step.metrics["groups_kept"] for step in steps] == [0] * 6
    assert world.trainer.version == 0 and "logprobs" not in world.trainer_group.calls


def test_a_resumed_loop_draws_the_rounds_of_the_unbroken_one() -> None:
    whole, first, second = World(), World(), World()
    whole.run(config(), reward=rarely)
    first.run(config(), reward=rarely, stop=3)
    second.trainer.logits_V = first.trainer.logits_V
    second.trainer.version = first.trainer.version
    second.run(config(), reward=rarely, start=3)
    assert first.engine.requests + second.engine.requests == whole.engine.requests
    assert torch.equal(second.trainer.logits_V, whole.trainer.logits_V)


def test_every_round_has_noise_of_its_own_and_the_first_that_of_its_step() -> None:
    assert [round_seed(7, step, 0) for step in range(5)] == [step_seed(7, s) for s in range(5)]
    seeds = {round_seed(seed, step, n) for seed in range(3) for step in range(20) for n in range(5)}
    assert len(seeds) == 3 * 20 * 5
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_penalty_tells_groups_apart_that_the_task_finds_equal() -> None:
    """Completions of all lengths, one task reward: only their lengths can teach."""
    long = replace(
        config(rounds=0, overlong="penalty", overlong_buffer=2),
        sampling=SamplingConfig(max_tokens=3),
    )
    world = World()
    [step, *_] = world.run(long, reward=lambda prompt, text, *, finished: 0.5, stop=1)
    assert step.metrics["reward"] == 0.5, "the task's own"
    assert step.metrics["update"] == 1
    batch = world.trainer.batches[0]
    assert batch.advantages_N is not None
    rows = [
        (int(batch.loss_mask_N[start:end].sum()), float(batch.advantages_N[end - 1]))
        for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    ]
    for place in range(0, len(rows), SAMPLES):
        ordered = sorted(rows[place : place + SAMPLES])
        gains = [gain for _, gain in ordered]
        assert gains == sorted(gains, reverse=True), "the longer, the worse"


def test_defaults_draw_one_round_and_keep_every_group() -> None:
    world = World(RowEngine())
    [step] = world.run(replace(CONFIG, steps=1, grpo=GRPOConfig(prompts_per_step=3)), reward=rarely)
    assert "rounds" not in step.metrics
    assert len(world.trainer.batches[0].offsets) - 1 == 3 * 16


def test_a_group_that_is_masked_out_whole_is_not_kept() -> None:
    """However different its rewards are, none of its completions is in the loss."""

    def cut_off(completion: Completion) -> Completion:
        is_even = int(completion.request.sample_id.prompt_uid.split("/")[1]) % 2 == 0
        return replace(completion, finish_reason="length" if is_even else "stop")

    world = World(RowEngine(cut_off))
    varied = config(overlong="mask", samples_per_prompt=8)
    steps = world.run(varied)
    batches = iter(world.trainer.batches)
    for step in steps:
        rewards: dict[str, set[float]] = {}
        for sample in step.samples:
            rewards.setdefault(sample.prompt.uid, set()).add(sample.reward.value)
        teaching = [
            uid for uid, values in rewards.items() if len(values) > 1 and int(uid[2:]) % 2 == 1
        ]
        assert step.metrics["groups_kept"] == min(3, len(teaching)) > 0
        silent = len(rewards) - len(teaching)
        assert step.metrics["zero_signal_fraction"] == silent / len(rewards)
        batch = next(batches)
        ends = zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
        assert all(bool(batch.loss_mask_N[start:end].any()) for start, end in ends)
