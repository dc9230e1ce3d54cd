"""The user's reward and environment, tried once before anything starts. Floor 4.

Called by `controller.setup`: a mistake in them should not wait for the end of the warm start.
"""

from collections.abc import Callable

from shardloop.controller.environments import CallingThread, guarded
from shardloop.controller.episodes import Episode
from shardloop.errors import RewardError, TaskError
from shardloop.rewards import score
from shardloop.tasks import no_env
from shardloop.types import (
    Completion,
    Env,
    Prompt,
    Request,
    RewardFn,
    SampleId,
    Sampling,
    Tokenizer,
)


def try_reward(reward: RewardFn, name: str, prompt: Prompt) -> None:
    """Calls the user's reward once, on an empty completion.

    Raises:
        RewardError: it raises, or returns no finite number.
    """
    try:
        score(reward, prompt, "", finished=False)
    except RewardError as error:
        raise RewardError(
            f"reward={name!r}, tried on an empty completion before the start: {error}"
        ) from error.__cause__ or error


def try_env(
    make: Callable[[Prompt], Env | None],
    prompt: Prompt,
    prompt_ids: tuple[int, ...],
    *,
    sampling: Sampling,
    tokenizer: Tokenizer,
    context_length: int,
) -> None:
    """Plays an empty turn, which a policy may always take: nothing but what ends it.

    Raises:
        TaskError, RewardError: the environment fails, or opens by a text that leaves no room.
    """
    if make is no_env:
        return
    end = sampling.stop_token_ids[:1] or tuple(tokenizer.encode(sampling.stop[0]))
    request = Request(
        prompt_ids=prompt_ids,
        sampling=sampling,
        sample_id=SampleId(prompt_uid=prompt.uid, index=0),
        seed=0,
    )
    turn = Completion(
        request=request,
        token_ids_T=end,
        behave_T=(0.0,) * len(end),
        full_T=(0.0,) * len(end),
        version_T=(0,) * len(end),
        loss_mask_T=(1,) * len(end),
        finish_reason="stop",
    )
    try:
        with CallingThread() as thread:
            # Two, as samples of one prompt have: neither may be the other's.
            env, _ = guarded(make, [prompt, prompt], thread)
            episode = Episode(
                request, prompt, env, tokenizer=tokenizer, context_length=context_length
            )
            episode.take(turn)
    except (TaskError, RewardError) as error:
        raise type(error)(f"tried on an empty turn before the start: {error}") from error.__cause__
