"""Rewards of completions, and what a person reads about them. Called by the loop. Floor 4.

Shape letters: P prompts, G samples per prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from shardloop.controller.rollouts import Rollout
from shardloop.errors import RewardError
from shardloop.rewards import score
from shardloop.types import Completion, Prompt, Reward, RewardFn, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """A completion as text, with its reward."""

    prompt: Prompt
    index: int
    text: str
    """All of it, an environment's answers included: what the reward judged."""
    marked: str
    """The same for people, an environment's answers in « »."""
    reward: Reward
    """The RewardFn's; with an environment, plus what that gave, which is also the part "env"."""
    num_tokens: int
    """Those that the policy chose."""
    finished: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scores:
    rewards_PG: Tensor
    """float64 [P, G]."""
    samples: Sequence[Sample]
    """P x G of them, the samples of a prompt side by side."""


def score_rollouts(
    rollouts: Sequence[Rollout], *, reward: RewardFn, tokenizer: Tokenizer
) -> Scores:
    """Judge every completion, and add what its environment gave.

    Raises:
        RewardError: the reward raised (that exception is the cause) or returned something that is
            no finite number; names the reward, the prompt, the sample and the value.
    """
    samples = [
        _judge(reward, tokenizer, rollout.prompt, index, completion, env_reward=env_reward)
        for rollout in rollouts
        for index, (completion, env_reward) in enumerate(
            zip(rollout.completions, rollout.env_rewards, strict=True)
        )
    ]
    values = torch.tensor([sample.reward.value for sample in samples], dtype=torch.float64)
    return Scores(rewards_PG=values.reshape(len(rollouts), -1), samples=samples)


def _judge(
    reward: RewardFn,
    tokenizer: Tokenizer,
    prompt: Prompt,
    index: int,
    completion: Completion,
    *,
    env_reward: float | None,
) -> Sample:
    text = tokenizer.decode(completion.token_ids_T)
    finished = completion.finish_reason == "stop"
    try:
        judged = score(reward, prompt, text, finished=finished)
    except RewardError as error:
        name = getattr(reward, "__name__", type(reward).__name__)
        raise RewardError(f"reward {name}, sample {index}: {error}") from error.__cause__ or error
    if env_reward is not None:
        parts = {**judged.parts, "env": env_reward}
        judged = replace(judged, value=judged.value + env_reward, parts=parts)
    return Sample(
        prompt=prompt,
        index=index,
        text=text,
        marked=marked_text(completion, tokenizer),
        reward=judged,
        num_tokens=sum(completion.loss_mask_T),
        finished=finished,
    )


def marked_text(completion: Completion, tokenizer: Tokenizer) -> str:
    """A completion for people: what the policy did not choose stands in « »."""
    token_ids = zip(completion.token_ids_T, completion.loss_mask_T, strict=True)
    text = ""
    for chosen, part in groupby(token_ids, key=lambda pair: bool(pair[1])):
        words = tokenizer.decode([token_id for token_id, _ in part])
        text += words if chosen else f"«{words}»"
    return text
