"""Puts sequences through the model: whole ones to fill the cache, one token each to decode.

Called by the local engine, once or twice a step. Floor 2. Shapes: n slots in use, B sequences of
one prefill batch, V vocabulary, D width; the others as in `slots`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardloop.engines.prefix import Prefilled, PrefixStore
from shardloop.engines.slots import SlotAttention, Slots
from shardloop.model import Decoder, PromptAttention
from shardloop.types import Completion

PREFILL_TOKENS = 8192
"""Most tokens, padding included, in one run of the model; a longer sequence goes alone."""


class Runner:
    """One rank's model runs over `slots`. Collective over the decoder's ranks, all but `__init__`.

    Counts `num_prefilled_tokens`, without padding.
    """

    def __init__(self, decoder: Decoder, *, slots: Slots, prefixes: PrefixStore) -> None:
        self._decoder, self._slots, self._prefixes = decoder, slots, prefixes
        self._device = slots.device
        self.num_prefilled_tokens = 0

    def decode(self) -> Tensor:
        """Next-token logits [n, V] of the slots in use, from their newest tokens and the cache."""
        positions_n = self._slots.length_S[: len(self._slots)] - 1
        num_positions = int(positions_n.max()) + 1
        hidden_n1D = self._decoder(
            self._slots.newest_n()[:, None],
            positions_BT=positions_n[:, None],
            num_positions=num_positions,
            history=SlotAttention(
                self._slots,
                positions_n=positions_n,
                num_positions=num_positions,
                attention=self._decoder.attention,
            ),
        )
        return self._decoder.logits(hidden_n1D[:, 0])

    def admit(self, started: Sequence[Completion], *, version: int) -> Tensor:
        """Give completions slots after those in use; logits of the next token of each.

        Only prompts that no entry of `version` holds go through the model, each once; what has
        drawn tokens already goes as a whole. If that fails, none has a slot.
        """
        fresh = [c.request.prompt_ids for c in started if not c.token_ids_T]
        missing = self._prefixes.missing(fresh, version=version)
        for rows, batch in self._prefill(missing):
            self._prefixes.put([missing[row] for row in rows], batch, version=version)
        resumed = [(*c.request.prompt_ids, *c.token_ids_T) for c in started if c.token_ids_T]
        whole = iter(self._prefill_all(resumed))
        sources = [
            next(whole)
            if c.token_ids_T
            else self._prefixes.get(c.request.prompt_ids, version=version)
            for c in started
        ]
        logits_nV = self._place(sources, first=len(self._slots))
        self._slots.admit(started)
        return logits_nV

    def refill(self) -> Tensor:
        """All sequences in use through the model as wholes; their next-token logits [n, V]."""
        n = len(self._slots)
        ids, lengths = self._slots.token_ids_SC[:n].tolist(), self._slots.length_S[:n].tolist()
        sequences = [tuple(row[:length]) for row, length in zip(ids, lengths, strict=True)]
        return self._place(self._prefill_all(sequences), first=0)

    def _place(self, sources: Sequence[tuple[Prefilled, int]], *, first: int) -> Tensor:
        """Copy prefilled rows into the slots from `first` on; their logits in the same order."""
        places: dict[Prefilled, list[tuple[int, int]]] = {}
        for index, (batch, row) in enumerate(sources):
            places.setdefault(batch, []).append((index, row))
        some_logits_BV = sources[0][0].logits_BV
        logits_nV = some_logits_BV.new_empty(len(sources), some_logits_BV.shape[1])
        for batch, pairs in places.items():
            into, rows = torch.tensor(pairs, device=self._device).unbind(1)
            num_tokens = batch.kv_L2BKTE.shape[4]
            self._slots.kv_L2SKCE[:, :, first + into, :, :num_tokens] = batch.kv_L2BKTE[:, :, rows]
            logits_nV[into] = batch.logits_BV[rows]
        return logits_nV

    def _prefill_all(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[Prefilled, int]]:
        """The batch of each sequence and its row there."""
        sources = {
            row: (batch, place)
            for rows, batch in self._prefill(sequences)
            for place, row in enumerate(rows)
        }
        return [sources[row] for row in range(len(sequences))]

    def _prefill(
        self, sequences: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[list[int], Prefilled]]:
        """Batches of sequences of like length: (their indices, what came out of the model)."""
        for rows in _batches([len(sequence) for sequence in sequences]):
            lengths = [len(sequences[row]) for row in rows]
            num_tokens = max(lengths)
            padded = [sequences[row] + (0,) * (num_tokens - len(sequences[row])) for row in rows]
            attention = PromptAttention(self._decoder.attention)
            hidden_BTD = self._decoder(
                torch.tensor(padded, device=self._device),
                positions_BT=torch.arange(num_tokens, device=self._device).expand(len(rows), -1),
                num_positions=num_tokens,
                history=attention,
            )
            last_B = torch.tensor(lengths, device=self._device) - 1
            hidden_BD = hidden_BTD[torch.arange(len(rows), device=self._device), last_B]
            logits_BV = self._decoder.logits(hidden_BD)
            self.num_prefilled_tokens += sum(lengths)
            yield rows, Prefilled(kv_L2BKTE=attention.kv(), logits_BV=logits_BV)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of sequences, like lengths together, at most PREFILL_TOKENS padded tokens each."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
