"""From prompts to groups of completions, through an engine. Floor 4.

Called by the loop, by evaluation and export, and by `shardloop generate`.

Shape letters: P prompts, G samples per prompt.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardloop.controller.engines import Engines
from shardloop.controller.environments import CallingThread, guarded
from shardloop.controller.episodes import Episode, play
from shardloop.errors import TaskError, UsageError
from shardloop.tasks import no_env
from shardloop.types import Completion, Env, Prompt, Request, SampleId, Sampling, Tokenizer
from shardloop.usercode import shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The G completions of one prompt, in the order of their sample index."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    env_rewards: tuple[float | None, ...]
    """What the environment of each completion gave in all; None where it had none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolutionRow:
    """A prompt and its worked solution as token ids."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """One entry for each id of the answer: 0 where it is an environment's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """An engine and everything that decides what it samples but the prompts and the seed."""

    engine: Engines
    tokenizer: Tokenizer
    sampling: Sampling
    """How completions are drawn, stop tokens included; `max_tokens` counts those that the policy
    chooses, over all turns together."""
    context_length: int
    """Most tokens of prompt and completion together."""
    make_env: Callable[[Prompt], Env | None] = no_env
    """The environment of a sample, see `shardloop.tasks.env_maker`."""

    def at(self, temperature: float) -> "Sampler":
        """The same at another temperature; 0 is greedy."""
        return replace(self, sampling=replace(self.sampling, temperature=temperature))

    def rollout(
        self, prompts: Sequence[Prompt], *, samples_per_prompt: int, seed: int
    ) -> list[Rollout]:
        """Sample G completions of each prompt, on the weights that the engine has.

        The same prompts, seed and weights give the same completions, whatever else the engine does.

        Args:
            seed: noise of these samples (see `step_seed`).
        Raises:
            TaskError: as `prompt_ids`; or, like RewardError, of an environment (see `GuardedEnv`).
            WorkerError: the engine gave fewer, other, aborted or empty completions.
        """
        requests = self._requests(prompts, samples_per_prompt=samples_per_prompt, seed=seed)
        asked = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
        with CallingThread() as thread:
            episodes = [
                Episode(
                    request,
                    prompt,
                    env,
                    tokenizer=self.tokenizer,
                    context_length=self.context_length,
                )
                for request, prompt, env in zip(
                    requests, asked, guarded(self.make_env, asked, thread), strict=True
                )
            ]
            play(episodes, self.engine.generate)
        starts = range(0, len(requests), samples_per_prompt)
        groups = [episodes[start : start + samples_per_prompt] for start in starts]
        return [
            Rollout(
                prompt=prompt,
                completions=tuple(episode.completion for episode in group),
                env_rewards=tuple(episode.env_reward for episode in group),
            )
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def _requests(
        self, prompts: Sequence[Prompt], *, samples_per_prompt: int, seed: int
    ) -> list[Request]:
        """P x G requests, the samples of a prompt side by side.

        A prompt that comes twice counts as another attempt, so that no two samples share their
        noise.
        """
        requests = []
        times_seen: dict[str, int] = {}
        for prompt in prompts:
            ids = prompt_ids(
                prompt,
                self.tokenizer,
                max_tokens=self.sampling.max_tokens,
                context_length=self.context_length,
            )
            attempt = times_seen.get(prompt.uid, 0)
            times_seen[prompt.uid] = attempt + 1
            for index in range(samples_per_prompt):
                sample_id = SampleId(prompt_uid=prompt.uid, index=index, attempt=attempt)
                requests.append(
                    Request(prompt_ids=ids, sampling=self.sampling, sample_id=sample_id, seed=seed)
                )
        return requests


def prompt_ids(
    prompt: Prompt, tokenizer: Tokenizer, *, max_tokens: int, context_length: int
) -> tuple[int, ...]:
    """Ids of a prompt that leaves room for `max_tokens` more.

    Raises:
        UsageError: `max_tokens` alone fills the context.
        TaskError: it is empty, has characters that the vocabulary lacks, or exceeds the context
            together with the answer.
    """
    if max_tokens >= context_length:
        raise UsageError(
            f"max_tokens={max_tokens} leaves no room for a prompt in the model's context of "
            f"{context_length}; choose fewer than {context_length}"
        )
    try:
        ids = tuple(tokenizer.encode_prompt(prompt))
    except TaskError as error:
        raise TaskError(f"{prompt.named}: {error}") from error
    if not ids:
        raise TaskError(f"prompt {prompt.uid!r} has no tokens; give it some text")
    if len(ids) + max_tokens > context_length:
        raise TaskError(
            f"prompt {prompt.uid!r} has {len(ids)} tokens; with an answer of max_tokens="
            f"{max_tokens} it exceeds the model's context of {context_length}: shorten the prompt "
            "or the answer"
        )
    return ids


def solution_row(prompt: Prompt, tokenizer: Tokenizer, context_length: int) -> SolutionRow:
    """Ids of a prompt and of its worked solution, which ends with the first stop token. Each text
    of an episode is tokenised by itself, as in a rollout.

    Raises:
        UsageError: the tokenizer has no stop token.
        TaskError: there is no solution, or one that has characters that the vocabulary lacks, ends
            with a text of the environment, or exceeds the context together with its prompt.
    """
    if not tokenizer.stop_token_ids:
        raise UsageError("the tokenizer has no end-of-sequence token; SFT teaches when to stop")
    answer_ids: list[int] = []
    loss_mask: list[int] = []
    for place, text in enumerate(_texts(prompt)):
        is_envs = place % 2 == 1
        try:
            ids = tokenizer.encode_plain(text) if is_envs else tokenizer.encode(text)
        except TaskError as error:
            raise TaskError(f"solution of {prompt.named}: {error}") from error
        answer_ids += ids
        loss_mask += [int(not is_envs)] * len(ids)
    row = SolutionRow(
        prompt_ids=prompt_ids(prompt, tokenizer, max_tokens=0, context_length=context_length),
        answer_ids=(*answer_ids, tokenizer.stop_token_ids[0]),
        loss_mask=(*loss_mask, 1),
    )
    if len(row.prompt_ids) + len(row.answer_ids) > context_length:
        raise TaskError(
            f"{prompt.named} has {len(row.prompt_ids)} tokens; with its solution of "
            f"{len(row.answer_ids)} it exceeds the model's context of {context_length}: shorten "
            "one of them"
        )
    return row


def _texts(prompt: Prompt) -> tuple[str, ...]:
    """The policy's and the environment's texts of a worked solution in turn."""
    solution = prompt.solution
    if solution is None:
        raise TaskError(
            f"{prompt.named} has no worked solution; SFT needs one: "
            "add a solution to the task, or set sft.steps to 0"
        )
    texts = (solution,) if isinstance(solution, str) else tuple(solution)
    if len(texts) % 2 == 0:
        raise TaskError(
            f"the solution of {prompt.named} has {len(texts)} texts; it must begin and end with one"
            " of the policy's, with those of the environment between them"
        )
    for text in texts:
        if not isinstance(text, str):
            raise TaskError(f"the solution of {prompt.named} holds {shown(text)}; it must be text")
    return texts


def step_seed(seed: int, step: int) -> int:
    """Seed of one step's sampling noise, in [0, 2**63): a pure function of the run's seed and step.

    A prompt that returns in a later step meets new noise, and a resumed run the noise it would have
    met.
    """
    digest = hashlib.blake2b(f"rollout/{seed}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
