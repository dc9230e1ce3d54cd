"""Our own engine: continuous batching over a slot cache, tensor-parallel.

Held by the workers of the engine role. Floor 3.

    submit ──▶ queue ──admit──▶ slots ──step: one token each──▶ finished
                ▲ │               │
          resume│ └─ abort ───────┴──▶ aborted, with the tokens so far
                └─────────────────────────┘

A step decodes all slots in use as one batch and fills free slots from the queue. A prompt goes
through the model once; its samples copy its keys and values. An update drops every key and value,
and a sleep their memory too: sequences in flight go through the model as wholes before their next
token, as resumed ones do.

An error loses nothing: a request leaves the queue when it has a slot, and a slot's tokens change
only by a whole step. The next step does what the failed one would have done.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shardloop.engines.base import check_requests, check_resumable, copy_pairs, nothing_drawn
from shardloop.engines.gate import Gate, SleepLevel
from shardloop.engines.prefix import PrefixStore
from shardloop.engines.runner import Runner
from shardloop.engines.sampling import draw, restated
from shardloop.engines.slots import Slots
from shardloop.engines.stops import Decode, StopTexts
from shardloop.engines.weights import (
    all_finite,
    check_finite,
    free_memory,
    local_pairs,
    restore_memory,
)
from shardloop.errors import ModelError, PolicyDiverged, UsageError
from shardloop.invariant import InvariantDecoder, Kernels
from shardloop.layout import Layout
from shardloop.model import Decoder, DecoderConfig, TensorParallel
from shardloop.transport.bind import check_bound
from shardloop.types import Completion, FinishReason, Request, SampleId


class LocalEngine:
    """One tensor-parallel rank of our engine; every rank makes the same calls, see `base.Engine`.

    Counts `num_steps`, `num_drawn_tokens` and `num_prefilled_tokens` (padding not counted).
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        *,
        layout: Layout,
        rank: int,
        comm: TensorParallel,
        dtype: torch.dtype,
        max_slots: int,
        max_model_len: int | None = None,
        decode: Decode | None = None,
        kernels: Kernels = "fast",
        device: torch.device | str = "cpu",
    ) -> None:
        """An engine without weights; it refuses to run until the first `commit_update`.

        Args:
            hf_config: contents of the model's config.json.
            layout: an engine layout of that model; `rank` is this engine's rank in it.
            comm: this rank's end of the tensor-parallel group.
            max_slots: most sequences decoded at the same time; memory is taken as needed.
            max_model_len: most tokens of prompt and completion; the model's context by default.
            decode: text of token ids, such as a tokenizer's `decode`; requests with stop texts are
                refused without.
            kernels: "invariant" makes log-probs equal to those of a trainer built so, bit for bit.
        Raises:
            ModelError: the model has settings we cannot run.
            PlanError: `layout` and `rank` do not describe the tensors of this model and `comm`.
            UsageError: max_slots below 1, or max_model_len not between 2 and the model's context.
        """
        self._config = DecoderConfig.from_hf(hf_config)
        context = self._config.max_positions
        self.max_model_len = context if max_model_len is None else max_model_len
        if max_slots < 1:
            raise UsageError(f"max_slots={max_slots}; choose 1 or more")
        if not 2 <= self.max_model_len <= context:
            raise UsageError(
                f"max_model_len={self.max_model_len}; choose 2 to max_position_embeddings={context}"
            )
        self.max_slots = max_slots
        self._is_invariant = kernels == "invariant"
        kind = InvariantDecoder if self._is_invariant else Decoder
        self._decoder = kind(self._config, tp=comm, dtype=dtype, device=device)
        check_bound(layout, rank, self._decoder.tensors(), dtype=dtype)
        self._layout, self._rank = layout, rank
        self._gate = Gate()
        self._queue: deque[Completion] = deque()
        self._texts = StopTexts(decode)
        self._prefixes = PrefixStore()
        self._slots = Slots(
            num_layers=self._config.num_layers,
            num_kv_heads=self._config.local_heads(comm.size)[1],
            head_dim=self._config.head_dim,
            dtype=dtype,
            device=torch.device(device),
        )
        self._runner = Runner(self._decoder, slots=self._slots, prefixes=self._prefixes)
        self._stale = False
        self._unclaimed: list[Completion] = []
        self.num_steps = self.num_drawn_tokens = 0
        self._num_waited_steps = self._num_waited_tokens = 0

    @property
    def version(self) -> int:
        return self._gate.version

    @property
    def num_in_flight(self) -> int:
        """Requests that are queued or in a slot."""
        return len(self._queue) + len(self._slots)

    @property
    def num_prefilled_tokens(self) -> int:
        return self._runner.num_prefilled_tokens

    @property
    def occupancy(self) -> float:
        """Share of the slots that drew a token, over the steps for which requests had to queue.

        1 where there was none.
        """
        if not self._num_waited_steps:
            return 1.0
        return self._num_waited_tokens / (self.max_slots * self._num_waited_steps)

    def layout(self) -> Layout:
        return self._layout

    def tensors(self) -> dict[str, Tensor]:
        return self._decoder.tensors()

    def begin_update(self, version: int) -> None:
        self._gate.begin(version)
        try:
            restore_memory(self._layout, self._rank, self.tensors())
        except BaseException:
            self._gate.cancel()
            raise
        self._prefixes.clear()
        self._slots.drop_cache()
        self._stale = len(self._slots) > 0

    def cancel_update(self) -> None:
        self._gate.cancel()

    def sleep(self, level: SleepLevel) -> None:
        self._gate.sleep(level)
        self._prefixes.clear()
        self._slots.free_cache()
        if level == "weights":
            free_memory(self.tensors())

    def wake(self) -> None:
        if self._gate.asleep is None:
            return
        restore_memory(self._layout, self._rank, self.tensors())
        self._slots.restore_cache()
        self._stale = len(self._slots) > 0
        self._gate.wake()

    def write(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._gate.check_updating("write")
        copy_pairs(pairs)

    def commit_update(self) -> None:
        """As `Engine.commit_update`; the update stays open if it leaves the weights unusable.

        Raises:
            UsageError: no update is open.
            PolicyDiverged: tensors with elements that are not finite; that is also what an update
                leaves of fresh weights, which are NaN, if it does not write all of them.
        """
        self._gate.check_updating("commit_update")
        why = "the policy has diverged (lower the learning rate), or was not written"
        check_finite(self.tensors(), PolicyDiverged, why)
        self._gate.commit()

    def load_from_state_dict(self, state_dict: Mapping[str, Tensor], *, version: int = 0) -> None:
        """A whole update from tensors by Hugging Face name, cast to the engine's dtype.

        Raises:
            ModelError: missing, unknown or misshapen tensors, all listed, or elements that are not
                finite in the engine's dtype; the update stays open.
        """
        self.begin_update(version)
        self.write(local_pairs(self._layout, self._rank, self.tensors(), state_dict))
        why = "the state dict is damaged, or too large for this dtype"
        check_finite(self.tensors(), ModelError, why)
        self._gate.commit()

    def submit(self, requests: Sequence[Request]) -> None:
        self._enqueue([nothing_drawn(request) for request in requests])

    def resume(self, completions: Sequence[Completion]) -> None:
        check_resumable(completions, vocab_size=self._config.vocab_size)
        self._enqueue(completions)

    def _enqueue(self, started: Sequence[Completion]) -> None:
        requests = [completion.request for completion in started]
        queued = (completion.request for completion in self._queue)
        check_requests(
            requests,
            in_flight=(request.sample_id for request in (*queued, *self._slots.requests)),
            vocab_size=self._config.vocab_size,
            max_model_len=self.max_model_len,
        )
        self._texts.check(requests)
        if requests:
            num_wanted = self.num_in_flight + len(requests)
            self._slots.reserve(
                num_slots=min(self.max_slots, 1 << (num_wanted - 1).bit_length()),
                num_tokens=max(len(r.prompt_ids) + r.sampling.max_tokens for r in requests),
            )
        for request in requests:
            self._prefixes.acquire(request.prompt_ids)
        self._queue.extend(started)

    def step(self) -> list[Completion]:
        self._gate.check_ready("step")
        ended: list[Completion] = []
        if self.num_in_flight:
            had_to_queue = len(self._queue) > 0
            logits_nV = self._next_logits()
            num_tokens = len(self._slots)
            ended = self._draw(logits_nV)
            self.num_steps += 1
            self.num_drawn_tokens += num_tokens
            self._num_waited_steps += had_to_queue
            self._num_waited_tokens += num_tokens * had_to_queue
        ended, self._unclaimed = self._unclaimed + ended, []
        return ended

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self._gate.check_ready("generate")
        self.submit(requests)
        wanted = [request.sample_id for request in requests]
        open_ids, done = set(wanted), dict[SampleId, Completion]()
        others, self._unclaimed = self._unclaimed, []
        try:
            while open_ids:
                for completion in self.step():
                    sample = completion.request.sample_id
                    if sample in open_ids:
                        done[sample] = completion
                        open_ids.discard(sample)
                    else:
                        others.append(completion)
        finally:
            self._unclaimed = others
            # After an error the engine must be as if these had never been asked for.
            self.abort([sample for sample in wanted if sample in open_ids])
        return [done[sample] for sample in wanted]

    def abort(self, sample_ids: Iterable[SampleId]) -> list[Completion]:
        ids = list(dict.fromkeys(sample_ids))
        slots = {r.sample_id: slot for slot, r in enumerate(self._slots.requests)}
        queued = {c.request.sample_id: c for c in self._queue}
        unknown = [sample for sample in ids if sample not in slots and sample not in queued]
        if unknown:
            raise UsageError(
                f"abort of {unknown[0]}: it is not in flight; abort what was submitted"
            )
        running = [sample for sample in ids if sample in slots]
        ended = self._release({slots[sample]: "aborted" for sample in running})
        completions = queued | dict(zip(running, ended, strict=True))
        dropped = set(ids)
        self._queue = deque(c for c in self._queue if c.request.sample_id not in dropped)
        for sample in ids:
            if sample in queued:
                self._prefixes.release(queued[sample].request.prompt_ids)
        return [completions[sample] for sample in ids]

    def _release(self, ends: Mapping[int, FinishReason]) -> list[Completion]:
        completions = self._slots.release(ends) if ends else []
        for completion in completions:
            self._prefixes.release(completion.request.prompt_ids)
        return completions

    def _next_logits(self) -> Tensor:
        """Logits of the next token of every slot in use, after filling free ones from the queue."""
        logits = []
        if len(self._slots):
            logits.append(self._runner.refill() if self._stale else self._runner.decode())
        self._stale = False
        admitted = list(islice(self._queue, self.max_slots - len(self._slots)))
        if admitted:
            logits.append(self._runner.admit(admitted, version=self.version))
            for _ in admitted:
                self._queue.popleft()
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _draw(self, logits_nV: Tensor) -> list[Completion]:
        """One more token for every slot in use; the completions that end with it."""
        if not all_finite(logits_nV):
            raise PolicyDiverged(
                f"the weights of version={self.version} give logits that are not finite; "
                "the policy has diverged, or overflows its dtype: lower the learning rate"
            )
        drawn = draw(logits_nV, self._slots.sampling, positions_n=self._slots.num_drawn_n())
        if self._is_invariant:
            drawn = restated(drawn, logits_nV, self._slots.sampling)
        ends = self._slots.ends(drawn, self._texts)
        self._slots.append(drawn, version=self.version)
        return self._release(ends)
