"""The Engine protocol, its update gate and the checks of requests.

Called by every engine. Floor 2.

    fresh ──begin_update──▶ updating ──commit_update──▶ ready ──begin_update──▶ updating …
                                                          │
                                                     step, generate

Only a ready engine runs. Requests may be submitted and aborted at any time; those in flight survive
an update, and each token says in version_T which weights made it.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from shardloop.errors import UsageError
from shardloop.layout import Layout
from shardloop.types import Completion, Request, SampleId

NO_WEIGHTS = -1
"""Version of an engine that has never had weights."""


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

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Collective: submit, step to the end, completions in request order.

        What else is in flight runs along and comes out of the next `step`.
        """
        ...

    def begin_update(self, version: int) -> None:
        """Until `commit_update` the weights may be half new and nothing runs. Again: start over."""
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
        """The live local weights by engine local name; change them only within an update."""
        ...

    def layout(self) -> Layout: ...


class UpdateGate:
    """Which version the weights are, and whether anything may run on them."""

    def __init__(self) -> None:
        self.version = NO_WEIGHTS
        self._next: int | None = None

    def begin(self, version: int) -> None:
        if version < 0:
            raise UsageError(f"begin_update: version={version}; choose 0 or more")
        self._next = version

    def commit(self) -> None:
        self.check_updating("commit_update")
        assert self._next is not None, "check_updating has seen an open update"
        self.version, self._next = self._next, None

    def check_updating(self, call: str) -> None:
        if self._next is None:
            raise UsageError(
                f"{call} outside an update (version={self.version}); call begin_update first"
            )

    def check_ready(self, call: str) -> None:
        if self._next is not None:
            raise UsageError(
                f"{call} while the update to version={self._next} is open and half written; "
                "call commit_update first"
            )
        if self.version == NO_WEIGHTS:
            raise UsageError(
                f"{call} on an engine without weights; call begin_update, write them, commit_update"
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
        UsageError: naming the sample, the value and the limit: an empty prompt, ids that are no
            tuple of integers or outside the vocabulary, no room for prompt and max_tokens in
            `max_model_len`, or a sample id that is already in flight.
    """
    taken = set(in_flight)
    for request in requests:
        sample = request.sample_id
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
