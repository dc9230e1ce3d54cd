"""An engine that answers from a function instead of a model.

Tests of loops and schedules hold it. Floor 2. Same protocol and life cycle as the real one: it
refuses to run without weights, gives each request one token per step, carries requests over updates
and labels each token with the version at its step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from shardloop.engines.base import check_requests, check_resumable, copy_pairs, nothing_drawn
from shardloop.engines.gate import Gate, SleepLevel
from shardloop.engines.stops import Decode, StopTexts
from shardloop.errors import UsageError
from shardloop.layout import Layout
from shardloop.types import Completion, FinishReason, Request, SampleId

Script = Callable[[Request], Sequence[int]]


class ScriptedEngine:
    """Answers with `script(request)`, cut at max_tokens and where a stop token or text ends it."""

    def __init__(
        self,
        script: Script,
        *,
        logprob: float = -1.0,
        version: int | None = 0,
        vocab_size: int = 2**31,
        max_model_len: int = 2**31,
        decode: Decode | None = None,
        tensors: Mapping[str, Tensor] | None = None,
        layout: Layout | None = None,
    ) -> None:
        """An engine at `version`, or without weights where that is None.

        Args:
            logprob: log-prob reported for every token, as behave and as full.
            decode: text of token ids; requests with stop texts are refused without.
        """
        self._script, self._logprob = script, logprob
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._tensors, self._layout = dict(tensors or {}), layout
        self._gate = Gate()
        if version is not None:
            self._gate.begin(version)
            self._gate.commit()
        self._texts = StopTexts(decode)
        self._answers: dict[SampleId, tuple[Completion, tuple[int, ...]]] = {}
        """What each began with, and all tokens it will have."""
        self._versions: dict[SampleId, list[int]] = {}
        self._unclaimed: list[Completion] = []

    @property
    def version(self) -> int:
        return self._gate.version

    @property
    def num_in_flight(self) -> int:
        return len(self._answers)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises UsageError also where the script answers with nothing."""
        self._enqueue([nothing_drawn(request) for request in requests])

    def resume(self, completions: Sequence[Completion]) -> None:
        """As `Engine.resume`: the script's answer goes on after the tokens that are there."""
        check_resumable(completions, vocab_size=self._vocab_size)
        self._enqueue(completions)

    def _enqueue(self, started: Sequence[Completion]) -> None:
        requests = [completion.request for completion in started]
        check_requests(
            requests,
            in_flight=self._answers,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
        )
        self._texts.check(requests)
        answers = [self._answer(completion) for completion in started]
        for completion, answer in zip(started, answers, strict=True):
            sample = completion.request.sample_id
            self._answers[sample] = (completion, answer)
            self._versions[sample] = list(completion.version_T)

    def _answer(self, started: Completion) -> tuple[int, ...]:
        request, before = started.request, started.token_ids_T
        rest = tuple(self._script(request)[len(before) : request.sampling.max_tokens])
        if not rest:
            raise UsageError(
                f"{request.sample_id}: the script answers with no token; give at least one"
            )
        tokens = (*before, *rest)
        ends = (
            end for end in range(len(before) + 1, len(tokens)) if self._stops(request, tokens[:end])
        )
        return tokens[: next(ends, len(tokens))]

    def _stops(self, request: Request, token_ids: tuple[int, ...]) -> bool:
        is_stop_token = token_ids[-1] in request.sampling.stop_token_ids
        return is_stop_token or self._texts.completed(request, token_ids)

    def step(self) -> list[Completion]:
        self._gate.check_ready("step")
        finished, self._unclaimed = self._unclaimed, []
        for sample, (_, answer) in list(self._answers.items()):
            self._versions[sample].append(self.version)
            if len(self._versions[sample]) == len(answer):
                finished.append(self._end(sample, aborted=False))
        return finished

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self._gate.check_ready("generate")
        self.submit(requests)
        wanted = [request.sample_id for request in requests]
        others, self._unclaimed = self._unclaimed, []
        done: dict[SampleId, Completion] = {}
        while any(sample in self._answers for sample in wanted):
            done.update({completion.request.sample_id: completion for completion in self.step()})
        ours = [done.pop(sample) for sample in wanted]
        self._unclaimed = [*others, *done.values()]
        return ours

    def abort(self, sample_ids: Iterable[SampleId]) -> list[Completion]:
        ids = list(dict.fromkeys(sample_ids))
        unknown = [sample for sample in ids if sample not in self._answers]
        if unknown:
            raise UsageError(
                f"abort of {unknown[0]}: it is not in flight; abort what was submitted"
            )
        return [self._end(sample, aborted=True) for sample in ids]

    def sleep(self, level: SleepLevel) -> None:
        self._gate.sleep(level)

    def wake(self) -> None:
        self._gate.wake()

    def begin_update(self, version: int) -> None:
        self._gate.begin(version)

    def cancel_update(self) -> None:
        self._gate.cancel()

    def write(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._gate.check_updating("write")
        copy_pairs(pairs)

    def commit_update(self) -> None:
        self._gate.commit()

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    def layout(self) -> Layout:
        if self._layout is None:
            raise UsageError("this ScriptedEngine was made without a layout; pass layout=...")
        return self._layout

    def _end(self, sample: SampleId, *, aborted: bool) -> Completion:
        started, answer = self._answers.pop(sample)
        request, versions = started.request, tuple(self._versions.pop(sample))
        count = len(versions)
        new = (self._logprob,) * (count - len(started.token_ids_T))
        cut_short = count == request.sampling.max_tokens
        stopped = count > 0 and self._stops(request, answer[:count])
        reason: FinishReason = "stop" if stopped or not cut_short else "length"
        return Completion(
            request=request,
            token_ids_T=answer[:count],
            behave_T=(*started.behave_T, *new),
            full_T=(*started.full_T, *new),
            version_T=versions,
            loss_mask_T=(1,) * count,
            finish_reason="aborted" if aborted else reason,
        )
