"""The sequences an engine is decoding: their tokens, log-probs and key/value cache.

Called by the local engine and its runner. Floor 2. Slot i of every tensor belongs to `requests[i]`,
and the slots in use are always the first n: decoding reads them as one view, and when a sequence
ends, the last one moves into its place.

Shapes: L layers, 2 for keys and values, S slots allocated, K kv heads and G query heads per kv head
of this rank, C tokens of room per slot, E head_dim, n slots in use, X stop tokens.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardloop.engines.sampling import Drawn, SamplingRows
from shardloop.engines.stops import StopTexts
from shardloop.model.decoder import AttentionFn
from shardloop.types import Completion, FinishReason, Request

_ROOM_STEP = 32
"""Room per slot grows in steps of this many tokens."""


class Slots:
    """Fixed room for many sequences, grown only when a longer or further one is admitted."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.device = device
        self._is_cache_freed = False
        self.kv_L2SKCE = torch.zeros(
            num_layers, 2, 0, num_kv_heads, 0, head_dim, dtype=dtype, device=device
        )
        self.token_ids_SC = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.version_SC = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self.behave_SC = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self.full_SC = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self.length_S = torch.zeros(0, dtype=torch.int64, device=device)
        self._hold([])

    def __len__(self) -> int:
        return len(self.requests)

    def reserve(self, *, num_slots: int, num_tokens: int) -> None:
        """Make room for `num_slots` sequences of up to `num_tokens` tokens; what is there stays."""
        slots, room = self.token_ids_SC.shape
        more_slots = max(0, num_slots - slots)
        more_room = -(-max(0, num_tokens - room) // _ROOM_STEP) * _ROOM_STEP
        if not more_slots and not more_room:
            return
        grown: dict[str, Tensor] = {}
        if not self._is_cache_freed:
            # Zeros, not garbage: a masked position has weight 0, and 0 * NaN would still be NaN.
            cache_sizes = (0, 0, 0, more_room, 0, 0, 0, more_slots)
            grown["kv_L2SKCE"] = F.pad(self.kv_L2SKCE, cache_sizes)
        for name in ("token_ids_SC", "version_SC", "behave_SC", "full_SC"):
            grown[name] = F.pad(getattr(self, name), (0, more_room, 0, more_slots))
        grown["length_S"] = F.pad(self.length_S, (0, more_slots))
        # All or nothing: memory may have run out on the way here.
        for name, tensor in grown.items():
            setattr(self, name, tensor)

    def admit(self, started: Sequence[Completion]) -> None:
        """Give each a slot after those in use, where its keys and values are already.

        What a completion has drawn before stays its own. If it fails, the slots in use are as they
        were.
        """
        first = len(self.requests)
        lengths = []
        for slot, completion in enumerate(started, start=first):
            num_prompt = len(completion.request.prompt_ids)
            ids = (*completion.request.prompt_ids, *completion.token_ids_T)
            lengths.append(len(ids))
            self.token_ids_SC[slot, : len(ids)] = torch.tensor(ids, device=self.device)
            drawn = slice(num_prompt, len(ids))
            for tensor, values in (
                (self.version_SC, completion.version_T),
                (self.behave_SC, completion.behave_T),
                (self.full_SC, completion.full_T),
            ):
                if values:
                    row = torch.tensor(values, dtype=tensor.dtype, device=self.device)
                    tensor[slot, drawn] = row
        self.length_S[first : first + len(lengths)] = torch.tensor(lengths, device=self.device)
        self._hold([*self.requests, *(completion.request for completion in started)])

    def append(self, drawn: Drawn, *, version: int) -> None:
        """One more token for every sequence."""
        n = len(self)
        place = (torch.arange(n, device=self.device), self.length_S[:n])
        self.token_ids_SC[place] = drawn.token_ids_n
        self.behave_SC[place] = drawn.behave_n
        self.full_SC[place] = drawn.full_n
        self.version_SC[place] = version
        self.length_S[:n] += 1

    def num_drawn_n(self) -> Tensor:
        """How many tokens each sequence has drawn so far."""
        return self.length_S[: len(self)] - self.num_prompt_n

    def newest_n(self) -> Tensor:
        """The last token of each sequence: drawn, but not yet in the cache."""
        n = len(self)
        return self.token_ids_SC[torch.arange(n, device=self.device), self.length_S[:n] - 1]

    def ends(self, drawn: Drawn, texts: StopTexts) -> dict[int, FinishReason]:
        """Slots that end with the tokens `drawn`, which are not appended yet, and why.

        A stop token and the token that completes a stop text say "stop", even where they are the
        last allowed one.
        """
        stopped_n = (drawn.token_ids_n[:, None] == self._stop_ids_nX).any(-1)
        done_n = stopped_n | (self.num_drawn_n() + 1 >= self._max_tokens_n)
        reasons: dict[int, FinishReason] = dict.fromkeys(done_n.nonzero()[:, 0].tolist(), "length")
        reasons |= dict.fromkeys(stopped_n.nonzero()[:, 0].tolist(), "stop")
        for slot in self._slots_with_texts:
            before = self.token_ids_SC[slot, self._drawn(slot)].tolist()
            if texts.completed(self.requests[slot], [*before, int(drawn.token_ids_n[slot])]):
                reasons[slot] = "stop"
        return reasons

    def release(self, ends: Mapping[int, FinishReason]) -> list[Completion]:
        """End the sequences of these slots: their completions in order; the rest close ranks."""
        completions = [self._completion(slot, reason) for slot, reason in ends.items()]
        num_left = len(self) - len(ends)
        holes = sorted(slot for slot in ends if slot < num_left)
        moved = [slot for slot in range(num_left, len(self)) if slot not in ends]
        if holes:
            self._move(src=moved, dst=holes)
        left = self.requests[:num_left]
        for source, hole in zip(moved, holes, strict=True):
            left[hole] = self.requests[source]
        self._hold(left)
        return completions

    def free_cache(self) -> None:
        """Give the memory of keys and values back until `restore_cache`; tokens stay."""
        self.kv_L2SKCE = self.kv_L2SKCE.new_zeros(self._cache_shape(num_slots=0, num_tokens=0))
        self._is_cache_freed = True

    def restore_cache(self) -> None:
        """Memory for keys and values again, all 0, if it was given back."""
        if self._is_cache_freed:
            slots, room = self.token_ids_SC.shape
            shape = self._cache_shape(num_slots=slots, num_tokens=room)
            self.kv_L2SKCE = self.kv_L2SKCE.new_zeros(shape)
            self._is_cache_freed = False

    def drop_cache(self) -> None:
        """Forget all keys and values (their weights are gone), keeping tokens and room."""
        self.kv_L2SKCE.zero_()

    def _cache_shape(self, *, num_slots: int, num_tokens: int) -> tuple[int, ...]:
        num_layers, two, _, num_kv_heads, _, head_dim = self.kv_L2SKCE.shape
        return num_layers, two, num_slots, num_kv_heads, num_tokens, head_dim

    def _drawn(self, slot: int) -> slice:
        """Where the tokens are that the sequence of `slot` has drawn."""
        return slice(len(self.requests[slot].prompt_ids), int(self.length_S[slot]))

    def _move(self, *, src: list[int], dst: list[int]) -> None:
        if not self._is_cache_freed:
            used = int(self.length_S[src].max())
            self.kv_L2SKCE[:, :, dst, :, :used] = self.kv_L2SKCE[:, :, src, :, :used]
        for tensor in (
            self.token_ids_SC,
            self.version_SC,
            self.behave_SC,
            self.full_SC,
            self.length_S,
        ):
            tensor[dst] = tensor[src]

    def _hold(self, requests: list[Request]) -> None:
        """Take `requests` for the slots in use, with tensors that say what each of them wants."""
        wanted = [request.sampling for request in requests]
        most_stops = max((len(s.stop_token_ids) for s in wanted), default=0)
        padded = [(*s.stop_token_ids, *[-1] * (most_stops - len(s.stop_token_ids))) for s in wanted]

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        sampling = SamplingRows.of(requests, device=self.device)
        num_prompt_n = column([len(request.prompt_ids) for request in requests])
        max_tokens_n = column([s.max_tokens for s in wanted])
        stop_ids_nX = torch.tensor(padded, dtype=torch.int64, device=self.device)
        self.requests, self.sampling, self.num_prompt_n = requests, sampling, num_prompt_n
        self._max_tokens_n = max_tokens_n
        self._stop_ids_nX = stop_ids_nX.view(len(wanted), most_stops)
        self._slots_with_texts = [slot for slot, s in enumerate(wanted) if s.stop]

    def _completion(self, slot: int, reason: FinishReason) -> Completion:
        drawn = self._drawn(slot)
        token_ids = tuple(self.token_ids_SC[slot, drawn].tolist())
        return Completion(
            request=self.requests[slot],
            token_ids_T=token_ids,
            behave_T=tuple(self.behave_SC[slot, drawn].tolist()),
            full_T=tuple(self.full_SC[slot, drawn].tolist()),
            version_T=tuple(self.version_SC[slot, drawn].tolist()),
            loss_mask_T=(1,) * len(token_ids),
            finish_reason=reason,
        )


class SlotAttention:
    """Attention of one new token per slot in use over its own history; serves one decode step."""

    def __init__(
        self,
        slots: Slots,
        *,
        positions_n: Tensor,
        num_positions: int,
        attention: AttentionFn | None = None,
    ) -> None:
        """`attention` takes the place of torch's own."""
        self._attention = attention
        self._kv = slots.kv_L2SKCE[:, :, : len(slots), :, :num_positions]
        self._place = (torch.arange(len(slots), device=slots.device), positions_n)
        seen_nC = torch.arange(num_positions, device=slots.device) <= positions_n[:, None]
        self._mask = torch.zeros(seen_nC.shape, dtype=self._kv.dtype, device=slots.device)
        self._mask = self._mask.masked_fill(~seen_nC, float("-inf"))[:, None, None]

    def attend(self, layer: int, q_n1HE: Tensor, k_n1KE: Tensor, v_n1KE: Tensor) -> Tensor:
        rows, positions = self._place
        keys_nKCE, values_nKCE = self._kv[layer]
        keys_nKCE[rows, :, positions] = k_n1KE[:, 0]
        values_nKCE[rows, :, positions] = v_n1KE[:, 0]
        if self._attention is not None:
            return self._attention(q_n1HE, keys_nKCE, values_nKCE, positions[:, None])
        # The query heads of one kv head stand where tokens usually do: they share its history.
        q_nKGE = q_n1HE[:, 0].reshape(len(q_n1HE), keys_nKCE.shape[1], -1, q_n1HE.shape[-1])
        out_nKGE = F.scaled_dot_product_attention(
            q_nKGE, keys_nKCE, values_nKCE, attn_mask=self._mask
        )
        return out_nKGE.flatten(1, 2)[:, None]
