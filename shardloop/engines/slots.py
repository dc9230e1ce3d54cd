"""The sequences an engine is decoding: their tokens, log-probs and key/value cache.

Called by the local engine and its runner. Floor 2. Slot i of every tensor belongs to `requests[i]`,
and the slots in use are always the first n: decoding reads them as one view, and when a sequence
ends, the last one moves into its place.

Shapes: L layers, 2 for keys and values, S slots allocated, K kv heads and G query heads per kv head
of this rank, C tokens of room per slot, E head_dim, n slots in use, X stop tokens.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from shardloop.engines.sampling import Drawn, SamplingRows
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
        # Zeros, not garbage: a masked position has weight 0, and 0 * NaN would still be NaN.
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
        grown = {"kv_L2SKCE": F.pad(self.kv_L2SKCE, (0, 0, 0, more_room, 0, 0, 0, more_slots))}
        for name in ("token_ids_SC", "version_SC", "behave_SC", "full_SC"):
            grown[name] = F.pad(getattr(self, name), (0, more_room, 0, more_slots))
        grown["length_S"] = F.pad(self.length_S, (0, more_slots))
        # All or nothing: memory may have run out on the way here.
        for name, tensor in grown.items():
            setattr(self, name, tensor)

    def admit(self, requests: Sequence[Request]) -> None:
        """Give each request a slot after those in use, where its keys and values are already.

        If it fails, the slots in use are as they were.
        """
        first = len(self.requests)
        for slot, request in enumerate(requests, start=first):
            prompt = torch.tensor(request.prompt_ids, device=self.device)
            self.token_ids_SC[slot, : len(prompt)] = prompt
        lengths = [len(request.prompt_ids) for request in requests]
        self.length_S[first : first + len(lengths)] = torch.tensor(lengths, device=self.device)
        self._hold([*self.requests, *requests])

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

    def finished(self) -> list[int]:
        """Slots whose newest token is a stop token or their last allowed one."""
        stopped_n = (self.newest_n()[:, None] == self._stop_ids_nX).any(-1)
        done_n = stopped_n | (self.num_drawn_n() >= self._max_tokens_n)
        slots: list[int] = done_n.nonzero()[:, 0].tolist()
        return slots

    def release(self, slots: Sequence[int], *, aborted: bool = False) -> list[Completion]:
        """End the sequences of `slots`: their completions in that order; the rest close ranks."""
        completions = [self._completion(slot, aborted=aborted) for slot in slots]
        ended = set(slots)
        num_left = len(self) - len(ended)
        holes = sorted(slot for slot in ended if slot < num_left)
        moved = [slot for slot in range(num_left, len(self)) if slot not in ended]
        if holes:
            self._move(src=moved, dst=holes)
        left = self.requests[:num_left]
        for source, hole in zip(moved, holes, strict=True):
            left[hole] = self.requests[source]
        self._hold(left)
        return completions

    def drop_cache(self) -> None:
        """Forget all keys and values (their weights are gone), keeping tokens and room."""
        self.kv_L2SKCE.zero_()

    def _move(self, *, src: list[int], dst: list[int]) -> None:
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

    def _completion(self, slot: int, *, aborted: bool) -> Completion:
        request = self.requests[slot]
        drawn = slice(len(request.prompt_ids), int(self.length_S[slot]))
        token_ids = tuple(self.token_ids_SC[slot, drawn].tolist())
        stopped = token_ids[-1:] != () and token_ids[-1] in request.sampling.stop_token_ids
        reason: FinishReason = "aborted" if aborted else "stop" if stopped else "length"
        return Completion(
            request=request,
            token_ids_T=token_ids,
            behave_T=tuple(self.behave_SC[slot, drawn].tolist()),
            full_T=tuple(self.full_SC[slot, drawn].tolist()),
            version_T=tuple(self.version_SC[slot, drawn].tolist()),
            loss_mask_T=(1,) * len(token_ids),
            finish_reason=reason,
        )


class SlotAttention:
    """Attention of one new token per slot in use over its own history; serves one decode step."""

    def __init__(self, slots: Slots, *, positions_n: Tensor, num_positions: int) -> None:
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
        # The query heads of one kv head stand where tokens usually do: they share its history.
        q_nKGE = q_n1HE[:, 0].reshape(len(q_n1HE), keys_nKCE.shape[1], -1, q_n1HE.shape[-1])
        out_nKGE = F.scaled_dot_product_attention(
            q_nKGE, keys_nKCE, values_nKCE, attn_mask=self._mask
        )
        return out_nKGE.flatten(1, 2)[:, None]
