"""Which rank trains which sequence, and how sequences lie in rows. Floor 1; called by the trainer.

    lengths ──plan_packing──▶ Packing ──micro_batches(rank)──▶ rows of indices ──pack──▶ PackedRows

Shapes: B rows of a micro-batch · T tokens of its longest row · N tokens of the whole batch ·
n scored tokens.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardloop.errors import UsageError
from shardloop.rl.batch import Batch

Rows = list[list[int]]
"""Sequence indices of each row of one micro-batch."""

EMPTY_ROW_TOKENS = 2
"""Width of the single padding row that stands for an empty micro-batch."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A deterministic division of sequences: each one lies in exactly one row of one micro-batch of
    one rank."""

    ranks: tuple[tuple[Rows, ...], ...]
    """Micro-batches by rank. Every rank has as many, at least 1: all enter the collectives of a
    micro-batch."""

    def micro_batches(self, rank: int) -> list[Rows]:
        """The micro-batches of `rank` in order; an empty list of rows where it has fewer than the
        others."""
        return list(self.ranks[rank])


def plan_packing(
    lengths: Sequence[int], *, row_tokens: int, rows_per_micro_batch: int, num_ranks: int
) -> Packing:
    """Divide sequences over ranks by tokens, then pack each rank's share first-fit-decreasing.

    Longest first, each sequence goes to the rank with the fewest tokens so far, so the loads of two
    ranks differ by at most the longest sequence. A sequence longer than `row_tokens` gets a row of
    its own. Ties go to the lower index: the same arguments give the same plan on every rank.

    Raises:
        UsageError: a length, `row_tokens`, `rows_per_micro_batch` or `num_ranks` below 1.
    """
    for name, value in (
        ("row_tokens", row_tokens),
        ("rows_per_micro_batch", rows_per_micro_batch),
        ("num_ranks", num_ranks),
    ):
        if value < 1:
            raise UsageError(f"{name}={value}; choose 1 or more")
    if any(length < 1 for length in lengths):
        raise UsageError(
            f"lengths has the value {min(lengths)}; every sequence needs at least 1 token"
        )
    shares = _balance(lengths, num_ranks)
    rows = [_first_fit(share, lengths, row_tokens) for share in shares]
    num_micro_batches = max(1, *(-(-len(rank_rows) // rows_per_micro_batch) for rank_rows in rows))
    ranks = tuple(
        tuple(
            rank_rows[index * rows_per_micro_batch : (index + 1) * rows_per_micro_batch]
            for index in range(num_micro_batches)
        )
        for rank_rows in rows
    )
    return Packing(ranks=ranks)


def _balance(lengths: Sequence[int], num_ranks: int) -> Rows:
    """The sequences of each rank, longest first."""
    shares: Rows = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + lengths[index], rank))
    return shares


def _first_fit(share: Sequence[int], lengths: Sequence[int], row_tokens: int) -> Rows:
    """Rows of at most `row_tokens`, fullest first, so that rows of one micro-batch are of similar
    width."""
    rows: Rows = []
    filled: list[int] = []
    for index in share:
        for row, used in enumerate(filled):
            if used + lengths[index] <= row_tokens:
                rows[row].append(index)
                filled[row] += lengths[index]
                break
        else:
            rows.append([index])
            filled.append(lengths[index])
    order = sorted(range(len(rows)), key=lambda row: (-filled[row], row))
    return [rows[row] for row in order]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """One micro-batch, ready for the model. All int64, padded on the right to the longest row."""

    input_ids_BT: Tensor
    position_ids_BT: Tensor
    """Place of each token within its own sequence, from 0; 0 in padding."""
    segment_ids_BT: Tensor
    """Place of the token's sequence within its row, -1 in padding: attention must stay within equal
    values."""
    target_positions_n: Tensor
    """Index into the flattened [B * T] of the token whose NEXT token is scored."""
    target_ids_n: Tensor
    """The token scored."""
    flat_index_n: Tensor
    """Index of the scored token in the batch's N."""


def pack(batch: Batch, rows: Rows) -> PackedRows:
    """Lay the batch's sequences out as `rows` says; only tokens under the loss mask are scored.

    Both the batch and the result are on the CPU.

    With no rows the result is one row of padding and n = 0, which a model can run forward and
    backward.
    """
    offsets: list[int] = batch.offsets.tolist()
    lengths = batch.lengths
    num_tokens = (
        max((sum(lengths[index] for index in row) for row in rows), default=0) or EMPTY_ROW_TOKENS
    )
    shape = (max(1, len(rows)), num_tokens)
    flat_index_BT = torch.full(shape, -1, dtype=torch.int64)
    position_ids_BT = torch.zeros(shape, dtype=torch.int64)
    segment_ids_BT = torch.full(shape, -1, dtype=torch.int64)
    for row, indices in enumerate(rows):
        start = 0
        for segment, index in enumerate(indices):
            place = slice(start, start + lengths[index])
            flat_index_BT[row, place] = torch.arange(offsets[index], offsets[index + 1])
            position_ids_BT[row, place] = torch.arange(lengths[index])
            segment_ids_BT[row, place] = segment
            start += lengths[index]
    flat_index = flat_index_BT.flatten()
    is_token = flat_index >= 0
    # The first token of a row carries no loss, so a scored token's predecessor is always of the
    # same sequence.
    is_scored = is_token & batch.loss_mask_N[flat_index.clamp(min=0)]
    scored_positions_n = is_scored.nonzero().squeeze(1)
    flat_index_n = flat_index[scored_positions_n]
    input_ids = torch.where(is_token, batch.token_ids_N[flat_index.clamp(min=0)], 0)
    return PackedRows(
        input_ids_BT=input_ids.view(shape),
        position_ids_BT=position_ids_BT,
        segment_ids_BT=segment_ids_BT,
        target_positions_n=scored_positions_n - 1,
        target_ids_n=batch.token_ids_N[flat_index_n],
        flat_index_n=flat_index_n,
    )
