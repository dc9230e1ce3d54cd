"""The synchronous GRPO loop, and evaluation. Called by runs and `shardloop eval`. Floor 4.

    sync ─▶ rollout ─▶ score ─▶ recompute ─▶ advantage ─▶ update
     │        │  ▲         │      │             │            │
     │        │  └─────────┘      trainer's     rewards of   chosen loss, optimizer,
     │        │  further rounds   log-probs,    each group   version v + 1
     │        │  (`rounds`)       engine asleep (`batches`)
     engine wakes and takes the trainer's weights (version v), unless an evaluation had it do so

Each arrow waits for the one before, so every sample trains the weights that drew it: lag 0. The
loop takes anything with the `call` of a worker group; it holds no state but the step number, which
is also the data cursor, so a resumed run needs no more than its start.

Shape letters: P prompts, G samples per prompt.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardloop.config import GRPOConfig, TrainConfig
from shardloop.controller.batches import add_advantages, has_signal, make_step_batch, recompute
from shardloop.controller.groups import WorkerGroup
from shardloop.controller.rollouts import Sampler
from shardloop.controller.rounds import Drawn, Group, draw_groups
from shardloop.controller.scoring import Sample, score_rollouts
from shardloop.metrics import PhaseTimes
from shardloop.rl.batch import Batch
from shardloop.schedule import learning_rate
from shardloop.types import Prompt, RewardFn, Task

Metrics = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one step of the loop leaves behind."""

    number: int
    """Steps done so far, this one included: where a resumed run starts."""
    metrics: Metrics
    """JSON numbers and, under `seconds`, the seconds of each phase."""
    samples: Sequence[Sample]
    """Of all groups that were sampled."""


def grpo_steps(
    *,
    trainer: WorkerGroup,
    sampler: Sampler,
    sync: WorkerGroup,
    task: Task,
    reward: RewardFn,
    config: TrainConfig,
    start: int = 0,
) -> Iterator[Step]:
    """Run steps `start` to `config.steps`, one at each `next`.

    Between them the caller may save or stop, and after the engine's `take_weights` also sample:
    with `engine.sleep` a step leaves the engine asleep.

    Args:
        trainer, sync: groups of `Trainer` and `WeightSync`, or objects like them.
        sampler: has the engines that `sync` writes to.
        start: steps already done by an earlier run.
    Raises:
        TaskError: a prompt that does not fit. RewardError: a reward that fails.
        WorkerError: a rank that fails.
    """
    engine, sleep = sampler.engine, config.engine.sleep
    for step in range(start, config.steps):
        times, began = PhaseTimes(), time.perf_counter()
        with times.phase("sync"):
            version = engine.take_weights(trainer, sync)
        drawn = draw_groups(
            sampler, task=task, reward=reward, config=config, step=step, times=times
        )
        assert_no_lag(drawn.groups, version)
        if sleep != "never":
            with times.phase("sync"):
                engine.sleep(sleep)
        learned = learn(trainer, drawn.kept, config, step=step, times=times)
        metrics = {"step": step + 1, "version": version, **sample_metrics(drawn, config.grpo)}
        metrics |= {**learned, **engine.traffic()}
        metrics |= speed_metrics(drawn, times, seconds=time.perf_counter() - began)
        samples = [sample for group in drawn.groups for sample in group.samples]
        yield Step(number=step + 1, metrics=metrics, samples=samples)


def assert_no_lag(groups: Sequence[Group], version: int) -> None:
    """Every token comes from the weights that are about to be trained."""
    versions = {
        v
        for group in groups
        for completion in group.rollout.completions
        for v in completion.version_T
    }
    assert versions == {version}, (
        f"tokens of versions {sorted(versions)} reached trainer version {version}"
    )


def learn(
    trainer: WorkerGroup,
    groups: Sequence[Group],
    config: TrainConfig,
    *,
    step: int,
    times: PhaseTimes,
) -> Metrics:
    """From judged groups to new weights: the second half of a step, with its metrics.

    Without groups, or without a loss token in them, nothing is computed: `update` is 0.
    """
    grpo, lr = config.grpo, learning_rate(step, config.steps, config.optim)
    if not groups:
        return {"update": 0, "lr": lr}
    with times.phase("recompute"):
        batch = make_step_batch(groups, config)
        if batch.num_loss_tokens == 0:
            return {"update": 0, "lr": lr}
        batch, measured = recompute(trainer, batch, grpo)
    with times.phase("advantage"):
        batch = add_advantages(batch, groups, grpo)
    with times.phase("update"):
        updated = update(trainer, batch, grpo, lr=lr)
    return {**updated, **measured, "lr": lr}


def update(trainer: WorkerGroup, batch: Batch, grpo: GRPOConfig, *, lr: float) -> Metrics:
    """`inner_epochs` optimizer steps on one batch, counted as one version.

    Without signal (every advantage 0 or masked out by the correction, and no KL or entropy in the
    loss) the gradient is exactly 0 and no step is made: AdamW would move the weights all the same,
    by its moments and its decay.

    Returns:
        `update` 1 and means over the inner epochs of what the trainer reports; only `update` 0
        where no step was made.
    """
    if not has_signal(batch, grpo):
        return {"update": 0}
    epochs = []
    for _ in range(grpo.inner_epochs):
        metrics = trainer.call("forward_backward", batch, grpo, collect="sum")
        epochs.append(metrics | trainer.call("step", lr, collect="same"))
    trainer.call("advance_version", collect="same")
    return {**{name: sum(e[name] for e in epochs) / len(epochs) for name in epochs[0]}, "update": 1}


def sample_metrics(drawn: Drawn, grpo: GRPOConfig) -> Metrics:
    """Of ALL groups that were sampled: to leave out those that teach nothing would flatter the
    reward, which is the task's own, without penalties and KL."""
    samples = [sample for group in drawn.groups for sample in group.samples]
    rewards = [sample.reward.value for sample in samples]
    metrics = {
        "reward": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "zero_signal_fraction": sum(not g.can_teach(grpo) for g in drawn.groups)
        / len(drawn.groups),
        "finished_fraction": sum(sample.finished for sample in samples) / len(samples),
        "tokens": sum(sample.num_tokens for sample in samples),
    }
    if grpo.resample_rounds:
        metrics |= {"rounds": drawn.num_rounds, "groups_kept": len(drawn.kept)}
    return metrics


def speed_metrics(drawn: Drawn, times: PhaseTimes, *, seconds: float) -> Metrics:
    tokens = sum(sample.num_tokens for group in drawn.groups for sample in group.samples)
    return {
        "tokens_per_s": tokens / seconds,
        "rollout_tokens_per_s": tokens / max(times.seconds["rollout"], 1e-9),
        "step_s": seconds,
        "seconds": dict(times.seconds),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    samples: Sequence[Sample]
    """One of each prompt."""
    rewards: Mapping[str, float]
    """Reward of each prompt, by uid."""


def evaluate(
    sampler: Sampler, prompts: Sequence[Prompt], *, reward: RewardFn, seed: int = 0
) -> Evaluation:
    """Judge one completion of each prompt, on the weights that the engine has.

    Errors as `grpo_steps`.
    """
    rollouts = sampler.rollout(prompts, samples_per_prompt=1, seed=seed)
    samples = score_rollouts(rollouts, reward=reward, tokenizer=sampler.tokenizer).samples
    return Evaluation(
        samples=samples, rewards={sample.prompt.uid: sample.reward.value for sample in samples}
    )
