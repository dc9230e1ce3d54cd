"""The synchronous loop on a one-row policy: lag, order of phases, resume, no signal, errors."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardloop.config import GRPOConfig, OptimConfig, TrainConfig
from shardloop.controller.loop import Step, evaluate, grpo_steps
from shardloop.controller.rollouts import Sampler
from shardloop.errors import RewardError, TaskError, WorkerError
from shardloop.schedule import learning_rate
from shardloop.types import Prompt, Reward, Sampling
from tests.controller.fakes import (
    STOP,
    VOCAB,
    DigitTask,
    InProcessGroup,
    LetterTokenizer,
    RowEngine,
    RowSync,
    RowTrainer,
    aborted,
    engines_of,
    share_of_a,
)

SAMPLING = Sampling(max_tokens=3, stop_token_ids=(STOP,))
CONFIG = TrainConfig(
    steps=6,
    grpo=GRPOConfig(prompts_per_step=2, samples_per_prompt=4),
    optim=OptimConfig(lr=0.5, warmup_steps=3),
)


class World:
    def __init__(self, engine: RowEngine | None = None, *, context_length: int = 16) -> None:
        self.trainer, self.engine = RowTrainer(), engine or RowEngine()
        self.sync = RowSync(self.trainer, self.engine)
        self.trainer_group = InProcessGroup(self.trainer)
        self.sampler = Sampler(
            engine=engines_of(self.engine),
            tokenizer=LetterTokenizer(),
            sampling=SAMPLING,
            context_length=context_length,
        )

    def run(
        self, config: TrainConfig = CONFIG, *, stop: int | None = None, **other: Any
    ) -> list[Step]:
        arguments = {"task": DigitTask(), "reward": share_of_a, "config": config} | other
        steps = grpo_steps(
            trainer=self.trainer_group,  # type: ignore[arg-type]
            sampler=self.sampler,
            sync=InProcessGroup(self.sync),  # type: ignore[arg-type]
            **arguments,
        )
        return list(itertools.islice(steps, stop))


def _constant(prompt: Prompt, text: str, *, finished: bool) -> Reward:
    return Reward(value=0.35)


def test_the_reward_rises() -> None:
    steps = World().run(replace(CONFIG, steps=40, optim=OptimConfig(lr=2.0)))
    rewards = [step.metrics["reward"] for step in steps]
    assert sum(rewards[:5]) / 5 < 0.4
    assert sum(rewards[-5:]) / 5 > 0.9


def test_every_sample_trains_the_weights_that_drew_it() -> None:
    world = World()
    steps = world.run()
    assert world.sync.versions == [0, 1, 2, 3, 4, 5]
    assert [step.metrics["version"] for step in steps] == [0, 1, 2, 3, 4, 5]
    assert all(step.metrics["gap_max"] < 1e-6 for step in steps)
    assert world.trainer.version == 6


def test_a_sync_that_leaves_the_engine_behind_is_noticed() -> None:
    world = World()
    world.sync.sync = lambda version: RowSync.sync(world.sync, 0)  # type: ignore[method-assign]
    assert len(world.run(stop=1)) == 1
    with pytest.raises(AssertionError, match=r"tokens of versions \[0\] reached trainer version 1"):
        world.run()


def test_old_is_computed_once_before_all_inner_epochs_which_count_as_one_version() -> None:
    world = World()
    config = replace(CONFIG, steps=1, grpo=replace(CONFIG.grpo, inner_epochs=3))
    start_V = world.trainer.logits_V.detach().clone()
    [step] = world.run(config)
    calls = world.trainer_group.calls
    assert calls == ["version", "logprobs", *["forward_backward", "step"] * 3, "advance_version"]
    batch = world.trainer.batches[-1]
    assert batch.old_N is not None
    expected_N = torch.log_softmax(start_V, dim=0)[batch.token_ids_N] * batch.loss_mask_N
    assert torch.equal(batch.old_N, expected_N)
    assert step.metrics["update"] == 1 and world.trainer.version == 1


def test_each_step_has_the_learning_rate_of_its_number() -> None:
    world = World()
    steps = world.run(start=2)
    expected = [learning_rate(step, 6, CONFIG.optim) for step in range(2, 6)]
    assert world.trainer.learning_rates == expected
    assert [step.metrics["lr"] for step in steps] == expected


def test_a_resumed_loop_samples_and_learns_as_the_unbroken_one() -> None:
    whole, first, second = World(), World(), World()
    whole.run()
    first.run(stop=3)
    second.trainer.logits_V = first.trainer.logits_V
    second.trainer.version = first.trainer.version
    second.run(start=3)
    assert first.engine.requests + second.engine.requests == whole.engine.requests
    assert torch.equal(second.trainer.logits_V, whole.trainer.logits_V)


def test_no_two_samples_of_a_run_share_their_noise() -> None:
    class Repeating(DigitTask):
        def prompts(self, split: str, *, seed: int, start: int, count: int) -> list[Prompt]:
            return [Prompt(uid="same", text="1")] * count

    world = World()
    world.run(task=Repeating())
    keys = {(request.seed, request.sample_id) for request in world.engine.requests}
    assert len(keys) == len(world.engine.requests) == 6 * 2 * 4


def test_without_signal_no_step_is_made_and_the_weights_stay() -> None:
    world = World()
    steps = world.run(reward=_constant)
    assert "step" not in world.trainer_group.calls
    assert torch.equal(world.trainer.logits_V, torch.zeros(VOCAB, dtype=torch.float64))
    assert [step.metrics["update"] for step in steps] == [0] * 6
    assert [step.metrics["zero_signal_fraction"] for step in steps] == [1.0] * 6
    assert world.trainer.version == 0 and world.sync.versions == [0]


def test_without_signal_a_kl_term_still_pulls() -> None:
    world = World()
    steps = world.run(replace(CONFIG, grpo=replace(CONFIG.grpo, kl_coef=0.1)), reward=_constant)
    assert [step.metrics["update"] for step in steps] == [1] * 6


def test_kl_is_exactly_zero_at_first_and_positive_once_the_policy_has_moved() -> None:
    world = World()
    steps = world.run(replace(CONFIG, grpo=replace(CONFIG.grpo, kl_coef=0.1)))
    assert steps[0].metrics["kl"] == 0.0
    assert steps[-1].metrics["kl"] > 0.0
    assert "kl" not in World().run(stop=1)[0].metrics


def test_gap_and_correction_compare_full_distributions_whatever_top_p_cut_off() -> None:
    engine = RowEngine()
    engine.behave_offset = 0.25
    world = World(engine)
    [step] = world.run(replace(CONFIG, steps=1))
    assert step.metrics["gap_max"] < 1e-6
    batch = world.trainer.batches[0]
    assert batch.weights_N is not None
    weights_n = batch.weights_N[batch.loss_mask_N]
    torch.testing.assert_close(weights_n, torch.ones_like(weights_n), atol=1e-6, rtol=0)


def test_metrics_agree_with_the_samples() -> None:
    world = World()
    [step] = world.run(stop=1)
    rewards = [sample.reward.value for sample in step.samples]
    assert step.metrics["reward"] == pytest.approx(sum(rewards) / 8)
    assert [sample.text for sample in step.samples] == [
        LetterTokenizer().decode(world.engine._complete(request).token_ids_T)
        for request in world.engine.requests
    ]
    assert step.metrics["tokens"] == sum(sample.num_tokens for sample in step.samples)
    assert step.metrics["wire_bytes"] == 8 * VOCAB
    assert list(step.metrics["seconds"]) == [
        "sync",
        "rollout",
        "score",
        "recompute",
        "advantage",
        "update",
    ]
    assert sum(step.metrics["seconds"].values()) <= step.metrics["step_s"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", None])
def test_a_reward_that_is_no_finite_number_ends_the_run(value: Any) -> None:
    def odd(prompt: Prompt, text: str, *, finished: bool) -> Any:
        return value

    with pytest.raises(RewardError, match=r"reward odd, sample 0: .*'0/0'") as caught:
        World().run(reward=odd)
    assert repr(value) in str(caught.value)


def test_a_reward_that_raises_is_named_with_its_prompt_and_its_error() -> None:
    def broken(prompt: Prompt, text: str, *, finished: bool) -> float:
        if prompt.uid == "0/1":
            raise KeyError("answer")
        return True

    with pytest.raises(RewardError, match=r"reward broken, sample 0: .*'0/1'.*answer") as caught:
        World().run(reward=broken)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_prompt_that_does_not_fit_the_context_is_named() -> None:
    with pytest.raises(TaskError, match=r"prompt '0/10' has 2 tokens.*max_tokens=3.*context of 4"):
        World(context_length=4).run()


@pytest.mark.parametrize(
    ("tweak", "message"),
    [
        (aborted, "is aborted after"),
        (lambda c: replace(c, request=replace(c.request, seed=1)), "in the order of the requests"),
    ],
)
def test_a_completion_that_is_not_what_was_asked_for_is_refused(tweak: Any, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        World(RowEngine(tweak)).run()


def test_a_missing_completion_is_refused() -> None:
    world = World()
    generate = world.engine.generate
    world.engine.generate = lambda r: generate(r)[1:]  # type: ignore[method-assign]
    with pytest.raises(WorkerError, match="answered 8 requests by 7 completions"):
        world.run()


def test_evaluation_gives_the_greedy_reward_of_each_prompt() -> None:
    world = World()
    world.engine.logits_V[1] = 1.0

    def a_on_x(prompt: Prompt, text: str, *, finished: bool) -> float:
        return float(text == "aaa") if prompt.uid == "x" else 0.5

    prompts = [Prompt(uid="x", text="1"), Prompt(uid="y", text="2")]
    result = evaluate(world.sampler.at(0.0), prompts, reward=a_on_x)
    assert result.rewards == {"x": 1.0, "y": 0.5}
    assert [sample.text for sample in result.samples] == ["aaa", "aaa"]
