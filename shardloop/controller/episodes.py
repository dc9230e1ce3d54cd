"""Samples of one or several turns: the policy's text and its environment's in turn. Floor 4.

Called by `controller.rollouts`.

    prompt ──▶ turn 0 ──▶ step ──observation──▶ turn 1 ──▶ step ──▶ … ──▶ one Completion
               policy     environment           policy     environment
    mask        1 1 1      0 0 0 0               1 1

A turn is a request whose prompt is everything so far: the ids of the prompt, those that the policy
sampled, and those of each observation, tokenised by itself and as plain text. Nothing is ever
tokenised again. An episode ends

    stop     when its environment is done (without one: when the policy ends its text);
    length   when the policy has chosen `max_tokens` tokens, over all turns together, or the context
             is full. An observation that leaves no room for another token of the policy is left
             out; one that comes when the episode is done only has to fit the context.

Since every turn takes at least one of the `max_tokens`, an episode has at most that many turns.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardloop.controller.environments import GuardedEnv
from shardloop.errors import TaskError, WorkerError
from shardloop.types import Completion, FinishReason, Prompt, Request, Tokenizer


class Episode:
    """One sample on its way. It depends on no other episode."""

    def __init__(
        self,
        request: Request,
        prompt: Prompt,
        env: GuardedEnv | None,
        *,
        tokenizer: Tokenizer,
        context_length: int,
    ) -> None:
        """
        Args:
            request: of the first turn as it is without an environment, with `max_tokens` for all
                turns together. Where the environment opens by a text, that is added to its prompt.
        Raises:
            TaskError: the environment fails, or its text does not fit the context.
        """
        self._prompt, self._env = prompt, env
        self._tokenizer, self._context_length = tokenizer, context_length
        self._first = request if env is None else self._opened(request, env)
        self._turns: list[Completion] = []
        self._token_ids: list[int] = []
        self._mask: list[int] = []
        self._versions: list[int] = []
        self._logprobs: list[tuple[float, float]] = []
        self.env_reward = None if env is None else 0.0
        """Sum of what the environment gave; None without one."""
        self.finish_reason: FinishReason | None = None
        """None while the episode is open."""

    def next_request(self) -> Request:
        """What the policy is asked next. Its turn is part of its identity, so its noise is new."""
        turn = len(self._turns)
        if turn == 0:
            return self._first
        return replace(
            self._first,
            prompt_ids=(*self._first.prompt_ids, *self._token_ids),
            sampling=replace(self._first.sampling, max_tokens=self._room(0)),
            sample_id=replace(self._first.sample_id, turn=turn),
        )

    def take(self, turn: Completion) -> None:
        """Adds a turn of the policy and what the environment answers to it.

        Raises:
            TaskError, RewardError: the environment fails, see `GuardedEnv.step`.
        """
        self._turns.append(turn)
        self._token_ids += turn.token_ids_T
        self._mask += turn.loss_mask_T
        self._versions += turn.version_T
        self._logprobs += zip(turn.behave_T, turn.full_T, strict=True)
        if self._env is None or turn.finish_reason != "stop":
            self.finish_reason = turn.finish_reason
        else:
            self._answer(self._env, turn)

    @property
    def completion(self) -> Completion:
        """All turns as one completion of the first request; an observation's tokens have mask and
        log-probs 0 and the version of the turn they answer."""
        if self._env is None:
            return self._turns[0]
        assert self.finish_reason is not None, "asked after the end"
        return Completion(
            request=self._first,
            token_ids_T=tuple(self._token_ids),
            behave_T=tuple(behave for behave, _ in self._logprobs),
            full_T=tuple(full for _, full in self._logprobs),
            version_T=tuple(self._versions),
            loss_mask_T=tuple(self._mask),
            finish_reason=self.finish_reason,
        )

    def _opened(self, request: Request, env: GuardedEnv) -> Request:
        opening = self._encode(env.reset(), "in reset")
        prompt_ids = (*request.prompt_ids, *opening)
        room = min(request.sampling.max_tokens, self._context_length - len(prompt_ids))
        if room < 1:
            raise TaskError(
                f"{self._prompt.named} and the text by which its environment opens have "
                f"{len(prompt_ids)} tokens, which fill the model's context of "
                f"{self._context_length}; shorten them"
            )
        sampling = replace(request.sampling, max_tokens=room)
        return replace(request, prompt_ids=prompt_ids, sampling=sampling)

    def _answer(self, env: GuardedEnv, turn: Completion) -> None:
        number = len(self._turns) - 1
        seen = env.step(self._tokenizer.decode(turn.token_ids_T), turn=number)
        assert self.env_reward is not None, "0.0 where there is an environment"
        self.env_reward += seen.reward
        answer = self._encode(seen.text, f"in turn {number + 1}")
        if self._fits(len(answer), done=seen.done):
            self._token_ids += answer
            self._mask += [0] * len(answer)
            self._versions += [turn.version_T[-1]] * len(answer)
            self._logprobs += [(0.0, 0.0)] * len(answer)
            self.finish_reason = "stop" if seen.done else None
        else:
            self.finish_reason = "length"

    def _fits(self, num_new: int, *, done: bool) -> bool:
        if done:
            num_before = len(self._first.prompt_ids) + len(self._token_ids)
            return num_before + num_new <= self._context_length
        return self._room(num_new) >= 1

    def _room(self, num_new: int) -> int:
        """Tokens that the policy may still choose after `num_new` tokens of an observation."""
        num_before = len(self._first.prompt_ids) + len(self._token_ids)
        in_context = self._context_length - num_before - num_new
        return min(self._first.sampling.max_tokens - sum(self._mask), in_context)

    def _encode(self, text: str, when: str) -> list[int]:
        try:
            return self._tokenizer.encode_plain(text)
        except TaskError as error:
            raise TaskError(f"the environment of {self._prompt.named} {when}: {error}") from error


def play(
    episodes: Sequence[Episode], generate: Callable[[Sequence[Request]], list[Completion]]
) -> None:
    """Gives all open episodes a turn in one call of `generate`, until none is open.

    Raises:
        TaskError, RewardError: an environment fails.
        WorkerError: the engine gave fewer, other, aborted or empty completions.
    """
    while still_open := [one for one in episodes if one.finish_reason is None]:
        requests = [episode.next_request() for episode in still_open]
        completions = generate(requests)
        check_completions(completions, requests)
        for episode, completion in zip(still_open, completions, strict=True):
            episode.take(completion)


def check_completions(completions: Sequence[Completion], requests: Sequence[Request]) -> None:
    """
    Raises:
        WorkerError: as `play`.
    """
    if len(completions) != len(requests):
        raise WorkerError(
            f"the engine answered {len(requests)} requests by {len(completions)} completions"
        )
    for request, completion in zip(requests, completions, strict=True):
        if completion.request != request:
            raise WorkerError(
                f"the engine answered {request.sample_id} by {completion.request.sample_id}; "
                "completions must come in the order of the requests"
            )
        if completion.finish_reason == "aborted" or not completion.token_ids_T:
            raise WorkerError(
                f"the completion of {request.sample_id} is {completion.finish_reason} after "
                f"{len(completion.token_ids_T)} tokens; every sample of a batch must be finished"
            )
