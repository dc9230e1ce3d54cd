"""From prompts to groups of completions, through an engine. Floor 4.

Called by the loop, by evaluation and export, and by `shardloop generate`.

Shape letters: P prompts, G samples per prompt.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardloop.controller.groups import WorkerGroup
from shardloop.errors import TaskError, UsageError, WorkerError
from shardloop.types import Completion, Prompt, Request, SampleId, Sampling, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The G completions of one prompt, in the order of their sample index."""

    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """An engine and everything that decides what it samples but the prompts and the seed."""

    engine: WorkerGroup
    """Anything with `call("generate", requests, collect="first")`."""
    tokenizer: Tokenizer
    sampling: Sampling
    """How completions are drawn, stop tokens included."""
    context_length: int
    """Most tokens of prompt and completion together."""

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
            TaskError: as `prompt_ids`.
            WorkerError: the engine gave fewer, other, aborted or empty completions.
        """
        requests = self._requests(prompts, samples_per_prompt=samples_per_prompt, seed=seed)
        completions = self.engine.call("generate", requests, collect="first")
        _check(completions, requests)
        starts = range(0, len(requests), samples_per_prompt)
        return [
            Rollout(
                prompt=prompt, completions=tuple(completions[start : start + samples_per_prompt])
            )
            for prompt, start in zip(prompts, starts, strict=True)
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


def solution_row(
    prompt: Prompt, tokenizer: Tokenizer, context_length: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of a prompt and of its worked solution, which ends with the first stop token.

    Raises:
        UsageError: the tokenizer has no stop token.
        TaskError: there is no solution, or one that has characters that the vocabulary lacks or
            exceeds the context together with its prompt.
    """
    if not tokenizer.stop_token_ids:
        raise UsageError("the tokenizer has no end-of-sequence token; SFT teaches when to stop")
    if prompt.solution is None:
        raise TaskError(
            f"{prompt.named} has no worked solution; SFT needs one: "
            "add a solution to the task, or set sft.steps to 0"
        )
    try:
        answer_ids = (*tokenizer.encode(prompt.solution), tokenizer.stop_token_ids[0])
    except TaskError as error:
        raise TaskError(f"solution of {prompt.named}: {error}") from error
    ids = prompt_ids(prompt, tokenizer, max_tokens=0, context_length=context_length)
    if len(ids) + len(answer_ids) > context_length:
        raise TaskError(
            f"{prompt.named} has {len(ids)} tokens; with its solution of {len(answer_ids)} it "
            f"exceeds the model's context of {context_length}: shorten one of them"
        )
    return ids, answer_ids


def step_seed(seed: int, step: int) -> int:
    """Seed of one step's sampling noise, in [0, 2**63): a pure function of the run's seed and step.

    A prompt that returns in a later step meets new noise, and a resumed run the noise it would have
    met.
    """
    digest = hashlib.blake2b(f"rollout/{seed}/{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _check(completions: Sequence[Completion], requests: Sequence[Request]) -> None:
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
