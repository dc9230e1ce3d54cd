"""The synchronous GRPO loop, and evaluation. Called by runs and `shardloop eval`. Floor 4.

    sync ─▶ rollout ─▶ score ─▶ advantage ─▶ recompute ─▶ update
     │        │                               │             │
     engine takes the trainer's weights       trainer's     clipped loss, optimizer,
     (version v)                              log-probs     version v + 1

Each arrow waits for the one before, so every sample trains the weights that drew it: lag 0. The
loop takes anything with the `call` of a worker group; it holds no state but the step number, which
is also the data cursor, so a resumed run needs no more than its start.

Shape letters: P prompts, G samples per prompt, N tokens of the batch.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardloop.config import DTypeName, GRPOConfig, Std, TrainConfig
from shardloop.controller.groups import WorkerGroup
from shardloop.controller.rollouts import Rollout, Sampler, step_seed
from shardloop.controller.scoring import Sample, Scores, score_rollouts
from shardloop.metrics import PhaseTimes
from shardloop.rl.advantages import grpo_advantages
from shardloop.rl.batch import Batch, make_batch
from shardloop.rl.correction import truncated_weights
from shardloop.rl.kl import kl_k3
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

    Between them the caller may evaluate, save, sync or stop.

    Args:
        trainer, sync: groups of `Trainer` and `WeightSync`, or objects like them.
        sampler: has the group of engines that `sync` writes to.
        start: steps already done by an earlier run.
    Raises:
        TaskError: a prompt that does not fit. RewardError: a reward that fails.
        WorkerError: a rank that fails.
    """
    count = config.grpo.prompts_per_step
    is_stale = True  # the caller may have changed the trainer's weights before
    for step in range(start, config.steps):
        times, began = PhaseTimes(), time.perf_counter()
        prompts = task.prompts("train", seed=config.seed, start=step * count, count=count)
        with times.phase("sync"):
            version = trainer.call("version", collect="same")
            wire_bytes = sync.call("sync", version, collect="first").wire_bytes if is_stale else 0
        with times.phase("rollout"):
            rollouts = sampler.rollout(
                prompts,
                samples_per_prompt=config.grpo.samples_per_prompt,
                seed=step_seed(config.seed, step),
            )
            assert_no_lag(rollouts, version)
        with times.phase("score"):
            scores = score_rollouts(rollouts, reward=reward, tokenizer=sampler.tokenizer)
        learned = learn(trainer, rollouts, scores, config, step=step, times=times)
        is_stale = bool(learned["update"])
        metrics = {"step": step + 1, "version": version, **sample_metrics(scores), **learned}
        metrics["wire_bytes"] = wire_bytes
        metrics |= speed_metrics(scores, times, seconds=time.perf_counter() - began)
        yield Step(number=step + 1, metrics=metrics, samples=scores.samples)


def assert_no_lag(rollouts: Sequence[Rollout], version: int) -> None:
    """Every token comes from the weights that are about to be trained."""
    versions = {
        v
        for rollout in rollouts
        for completion in rollout.completions
        for v in completion.version_T
    }
    assert versions == {version}, (
        f"tokens of versions {sorted(versions)} reached trainer version {version}"
    )


def learn(
    trainer: WorkerGroup,
    rollouts: Sequence[Rollout],
    scores: Scores,
    config: TrainConfig,
    *,
    step: int,
    times: PhaseTimes,
) -> Metrics:
    """From judged completions to new weights: the second half of a step, with its metrics."""
    grpo = config.grpo
    with times.phase("advantage"):
        batch = advantage_batch(rollouts, scores, std=grpo.std, dtype=config.trainer.dtype)
    with times.phase("recompute"):
        batch, recompute_metrics = recompute(trainer, batch, grpo)
    with times.phase("update"):
        lr = learning_rate(step, config.steps, config.optim)
        has_signal = scores.num_flat_groups < len(rollouts) or grpo.kl_coef > 0.0
        update_metrics = update(trainer, batch, grpo, lr=lr, has_signal=has_signal)
    return {**update_metrics, **recompute_metrics, "lr": lr}


def advantage_batch(
    rollouts: Sequence[Rollout], scores: Scores, *, std: Std, dtype: DTypeName
) -> Batch:
    """Values are float64 where the trainer computes in it, else float32."""
    advantages_PG = grpo_advantages(scores.rewards_PG, std=std)
    wide = torch.promote_types(getattr(torch, dtype), torch.float32)
    completions = [completion for rollout in rollouts for completion in rollout.completions]
    return make_batch(completions, advantages_PG.flatten().to(wide))


def recompute(trainer: WorkerGroup, batch: Batch, grpo: GRPOConfig) -> tuple[Batch, Metrics]:
    """Add the trainer's own log-probs, the reference's for a KL term, and the correction weights.

    Returns:
        The fuller batch; and gap_mean and gap_max of |old - engine's full log-prob| over the loss
        tokens, ess, and kl (k3 to the reference, exactly 0 while both have the same weights).
    """
    assert batch.full_N is not None, "made from completions"
    mask_N = batch.loss_mask_N
    old_N: Tensor = trainer.call("logprobs", batch, collect="sum")
    correction = truncated_weights(
        old_N,
        batch.full_N,
        kind=grpo.correction,
        cap=grpo.correction_cap,
        mask_N=mask_N,
        offsets=batch.offsets,
    )
    metrics = {
        "gap_mean": correction.gap_mean,
        "gap_max": correction.gap_max,
        "ess": correction.ess,
    }
    batch = replace(batch, old_N=old_N, weights_N=correction.weights_N)
    if grpo.kl_coef > 0.0:
        ref_N: Tensor = trainer.call("logprobs", batch, policy="reference", collect="sum")
        metrics["kl"] = kl_k3(old_N, ref_N)[mask_N].mean().item()
        batch = replace(batch, ref_N=ref_N)
    return batch, metrics


def update(
    trainer: WorkerGroup, batch: Batch, grpo: GRPOConfig, *, lr: float, has_signal: bool
) -> Metrics:
    """`inner_epochs` optimizer steps on one batch, counted as one version.

    Without signal (every group's rewards equal, and no KL term) the gradient is exactly 0 and no
    step is made: AdamW would move the weights all the same, by its moments and its decay.

    Returns:
        `update` 1 and means over the inner epochs of what the trainer reports; only `update` 0
        where no step was made.
    """
    if not has_signal:
        return {"update": 0}
    epochs = []
    for _ in range(grpo.inner_epochs):
        metrics = trainer.call("forward_backward", batch, grpo, collect="sum")
        epochs.append(metrics | trainer.call("step", lr, collect="same"))
    trainer.call("advance_version", collect="same")
    return {**{name: sum(e[name] for e in epochs) / len(epochs) for name in epochs[0]}, "update": 1}


def sample_metrics(scores: Scores) -> Metrics:
    samples = scores.samples
    return {
        "reward": scores.rewards_PG.mean().item(),
        "reward_std": scores.rewards_PG.std(correction=0).item(),
        "zero_signal_fraction": scores.num_flat_groups / len(scores.rewards_PG),
        "finished_fraction": sum(sample.finished for sample in samples) / len(samples),
        "tokens": sum(sample.num_tokens for sample in samples),
    }


def speed_metrics(scores: Scores, times: PhaseTimes, *, seconds: float) -> Metrics:
    tokens = sum(sample.num_tokens for sample in scores.samples)
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
