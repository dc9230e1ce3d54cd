"""The Engine protocol and the checks of what engines are asked for.

Called by every engine. Floor 2. What an engine allows when is drawn in `engines.gate`.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from shardloop.engines.gate import SleepLevel
from shardloop.errors import UsageError
from shardloop.layout import Layout
from shardloop.types import Completion, Request, SampleId


class Engine(Protocol):
    """One rank of an engine. Every rank of its layout must make the same calls, with the same
    arguments.

    All methods raise UsageError where the state or the arguments do not allow the call, before
    anything changes.
    """

    @property
    def version(self) -> int:
        """Version of the weights last committed; `NO_WEIGHTS` before the first."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Sample ids in flight are distinct."""
        ...

    def step(self) -> list[Completion]:
        """Collective: one more token per active request. Returns what finished, in any order."""
        ...

    def abort(self, sample_ids: Iterable[SampleId]) -> list[Completion]:
        """End requests now: their tokens so far, finish_reason "aborted", in the order given."""
        ...

    def resume(self, completions: Sequence[Completion]) -> None:
        """Queue aborted completions to go on: their tokens, log-probs and versions stay.

        Noise goes on at the same positions: with the same weights the end is as if there had been
        no abort. Sample ids in flight are distinct.
        """
        ...

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Collective: submit, step to the end, completions in request order.

        What else is in flight runs along and comes out of the next `step`.
        """
        ...

    def begin_update(self, version: int) -> None:
        """Until `commit_update` the weights may be half new and nothing runs. Again: start over.

        Where it raises, it has opened no update.
        """
        ...

    def cancel_update(self) -> None:
        """Nothing has been written since `begin_update`: what ran before it runs again.

        An update that it took over, which may have written before, stays open.
        """
        ...

    def write(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Within an update: copy each second tensor into the first, a view of `tensors()`.

        The two have one shape; the value is cast to the view's dtype.
        """
        ...

    def commit_update(self) -> None:
        """The weights are complete: the version is the one given to `begin_update`."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The live local weights by engine local name; change them only within an update.

        The same storage for the engine's whole life. Asleep at level "weights" it has no memory:
        `begin_update` and `wake` bring that back, unwritten.
        """
        ...

    def sleep(self, level: SleepLevel) -> None:
        """Free the cache, or the weights too, until `wake`. Asleep already: what is left of that.

        Requests in flight stay and go on after waking.
        """
        ...

    def wake(self) -> None:
        """Ready again; after "weights" only once an update has been committed. Awake: nothing."""
        ...

    def layout(self) -> Layout: ...


def nothing_drawn(request: Request) -> Completion:
    """What a request is before its first token."""
    return Completion(
        request=request,
        token_ids_T=(),
        behave_T=(),
        full_T=(),
        version_T=(),
        loss_mask_T=(),
        finish_reason="aborted",
    )


def copy_pairs(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first.

    Raises:
        UsageError: shapes that differ; pairs before that one are written.
    """
    for local, value in pairs:
        if local.shape != value.shape:
            raise UsageError(
                f"write of a value of shape {tuple(value.shape)} into a view of shape "
                f"{tuple(local.shape)}; give both one shape"
            )
        local.copy_(value)


def check_requests(
    requests: Sequence[Request],
    *,
    in_flight: Iterable[SampleId],
    vocab_size: int,
    max_model_len: int,
) -> None:
    """Refuse a list of requests as a whole if any one of them cannot run.

    Raises:
        UsageError: naming the sample, the value and the limit: an identity that is no plain text
            and integers, an empty prompt, ids that are no tuple of integers or outside the
            vocabulary, no room for prompt and max_tokens in `max_model_len`, or a sample id that
            is already in flight.
    """
    taken = set(in_flight)
    for request in requests:
        sample = request.sample_id
        _check_identity(request)
        if sample in taken:
            raise UsageError(
                f"{sample} is in flight already; give each request its own index or attempt"
            )
        taken.add(sample)
        if not request.prompt_ids:
            raise UsageError(f"{sample}: prompt_ids is empty; give it at least one token")
        _check_ids(request, "prompt_ids", request.prompt_ids, vocab_size=vocab_size)
        _check_ids(
            request, "stop_token_ids", request.sampling.stop_token_ids, vocab_size=vocab_size
        )
        num_prompt, num_new = len(request.prompt_ids), request.sampling.max_tokens
        if num_prompt + num_new > max_model_len:
            raise UsageError(
                f"{sample}: {num_prompt} prompt tokens and max_tokens={num_new} exceed the context "
                f"of {max_model_len} tokens; shorten the prompt or set max_tokens to at most "
                f"{max(0, max_model_len - num_prompt)}"
            )


def check_resumable(completions: Sequence[Completion], *, vocab_size: int) -> None:
    """Refuse a list of completions as a whole if any one of them cannot go on.

    Its request is for `check_requests` to judge.

    Raises:
        UsageError: naming the sample and why.
    """
    for completion in completions:
        _check_ids(completion.request, "token_ids_T", completion.token_ids_T, vocab_size=vocab_size)
        sample, num_drawn = completion.request.sample_id, len(completion.token_ids_T)
        most = completion.request.sampling.max_tokens
        if completion.finish_reason != "aborted":
            raise UsageError(
                f"resume of {sample}, which ended with finish_reason="
                f"{completion.finish_reason!r}; resume what abort returned"
            )
        if num_drawn >= most:
            raise UsageError(
                f"resume of {sample}: it has {num_drawn} tokens of max_tokens={most}; resume what "
                "abort returned"
            )
        logprobs = (*completion.behave_T, *completion.full_T)
        if not all(type(x) is float for x in logprobs) or not all(
            type(version) is int for version in completion.version_T
        ):
            raise UsageError(
                f"resume of {sample}: behave_T and full_T hold something else than floats, or "
                "version_T than integers; resume what abort returned"
            )
        if 0 in completion.loss_mask_T:
            raise UsageError(
                f"resume of {sample}: it holds tokens that no engine drew (loss_mask_T is 0); "
                "submit a new request whose prompt_ids end with them"
            )


def _check_identity(request: Request) -> None:
    """Refuse all but plain text and integers: the noise is made of how these are written."""
    sample = request.sample_id
    if type(sample.prompt_uid) is not str:
        raise UsageError(f"{sample}: prompt_uid={sample.prompt_uid!r}; pass a text")
    for name, value in (
        ("index", sample.index),
        ("attempt", sample.attempt),
        ("turn", sample.turn),
        ("seed", request.seed),
    ):
        if type(value) is not int:
            raise UsageError(f"{sample}: {name}={value!r}; pass a Python integer")


def _check_ids(request: Request, what: str, ids: Sequence[int], *, vocab_size: int) -> None:
    odd = [token for token in ids if type(token) is not int]
    if odd or type(ids) is not tuple:
        found = f"holds {odd[0]!r}" if odd else f"is a {type(ids).__name__}"
        raise UsageError(f"{request.sample_id}: {what} {found}; pass a tuple of Python integers")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise UsageError(
            f"{request.sample_id}: {what} holds {outside[0]}, outside the vocabulary of "
            f"{vocab_size} ids; use the tokenizer that belongs to the model"
        )
