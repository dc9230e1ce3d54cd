"""Packing: every sequence exactly once, alike on all ranks, and apart from its neighbours."""

import random
from itertools import chain

import pytest
import torch

from shardloop.errors import UsageError
from shardloop.rl.batch import Batch, sft_batch
from shardloop.rl.packing import Packing, pack, plan_packing


def indices(packing: Packing, rank: int) -> list[int]:
    return list(chain.from_iterable(chain.from_iterable(packing.micro_batches(rank))))


def random_batch(seed: int, num_rows: int = 9) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 7, (num_rows, 2), generator=generator).tolist()
    draw = [torch.randint(0, 50, (sum(size),), generator=generator).tolist() for size in sizes]
    return sft_batch(
        [(ids[: size[0]], ids[size[0] :]) for ids, size in zip(draw, sizes, strict=True)]
    )


@pytest.mark.parametrize("seed", range(60))
def test_every_sequence_lies_in_exactly_one_row_of_one_rank(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 40) for _ in range(draw.randint(0, 60))]
    row_tokens, rows_per_micro_batch, num_ranks = (
        draw.randint(1, 50),
        *draw.choices(range(1, 6), k=2),
    )
    packing = plan_packing(
        lengths,
        row_tokens=row_tokens,
        rows_per_micro_batch=rows_per_micro_batch,
        num_ranks=num_ranks,
    )
    placed = list(chain.from_iterable(indices(packing, rank) for rank in range(num_ranks)))
    assert sorted(placed) == list(range(len(lengths)))
    for rank in range(num_ranks):
        for rows in packing.micro_batches(rank):
            assert len(rows) <= rows_per_micro_batch
            assert all(
                len(row) == 1 or sum(lengths[index] for index in row) <= row_tokens for row in rows
            )
    loads = [sum(lengths[index] for index in indices(packing, rank)) for rank in range(num_ranks)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@pytest.mark.parametrize("lengths", [[], [3], [40, 39, 38], [40] + [1] * 30])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_rank_has_the_same_number_of_micro_batches(
    lengths: list[int], num_ranks: int
) -> None:
    packing = plan_packing(lengths, row_tokens=4, rows_per_micro_batch=2, num_ranks=num_ranks)
    counts = [len(packing.micro_batches(rank)) for rank in range(num_ranks)]
    assert len(set(counts)) == 1 and counts[0] >= 1


def test_the_plan_depends_on_nothing_but_its_arguments() -> None:
    lengths = [5, 5, 5, 9, 1, 1]
    arguments = {"row_tokens": 10, "rows_per_micro_batch": 2, "num_ranks": 2}
    assert plan_packing(lengths, **arguments) == plan_packing(tuple(lengths), **arguments)
    # By hand: 9 to rank 0; 5, 5 to rank 1; 5 to rank 0 (9 < 10); 1, 1 to rank 1 (10 < 14).
    packing = plan_packing(lengths, **arguments)
    assert packing.micro_batches(0) == [[[3], [2]]]
    assert packing.micro_batches(1) == [[[0, 1], [4, 5]]]


def test_first_fit_leaves_at_most_one_row_half_empty() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 65, (200,), generator=generator).tolist()
    packing = plan_packing(lengths, row_tokens=64, rows_per_micro_batch=1000, num_ranks=1)
    rows = packing.micro_batches(0)[0]
    used = sorted(sum(lengths[index] for index in row) for row in rows)
    assert used[1] > 32
    assert len(rows) <= 1.25 * sum(lengths) / 64


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_packed_rows_give_every_loss_token_its_own_predecessor_and_place(
    seed: int, num_ranks: int
) -> None:
    batch = random_batch(seed)
    packing = plan_packing(
        batch.lengths, row_tokens=16, rows_per_micro_batch=2, num_ranks=num_ranks
    )
    scored: list[int] = []
    for rank in range(num_ranks):
        for rows in packing.micro_batches(rank):
            packed = pack(batch, rows)
            scored += packed.flat_index_n.tolist()
            flat_ids = packed.input_ids_BT.flatten()
            positions = packed.position_ids_BT.flatten()
            segments = packed.segment_ids_BT.flatten()
            assert torch.equal(packed.target_ids_n, batch.token_ids_N[packed.flat_index_n])
            before = packed.target_positions_n
            assert torch.equal(flat_ids[before], batch.token_ids_N[packed.flat_index_n - 1])
            assert torch.equal(flat_ids[before + 1], packed.target_ids_n)
            assert torch.equal(segments[before], segments[before + 1])
            starts = batch.offsets[
                torch.searchsorted(batch.offsets, packed.flat_index_n, right=True) - 1
            ]
            assert torch.equal(positions[before], packed.flat_index_n - 1 - starts)
    assert sorted(scored) == batch.loss_mask_N.nonzero().squeeze(1).tolist()


def test_positions_restart_and_padding_is_marked() -> None:
    batch = sft_batch([([1, 2], [3]), ([4], [5]), ([6], [7])])
    packed = pack(batch, [[0, 1], [2]])
    assert packed.input_ids_BT.tolist() == [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0]]
    assert packed.position_ids_BT.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]]
    assert packed.segment_ids_BT.tolist() == [[0, 0, 0, 1, 1], [0, 0, -1, -1, -1]]
    assert packed.target_positions_n.tolist() == [1, 3, 5]
    assert packed.flat_index_n.tolist() == [2, 4, 6]


def test_an_empty_micro_batch_is_padding_that_scores_nothing() -> None:
    packed = pack(sft_batch([([1], [2])]), [])
    assert packed.segment_ids_BT.tolist() == [[-1, -1]]
    assert packed.input_ids_BT.tolist() == [[0, 0]]
    assert packed.target_ids_n.tolist() == packed.flat_index_n.tolist() == []
    assert packed.target_ids_n.dtype == packed.target_positions_n.dtype == torch.int64


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="num_ranks=0"):
        plan_packing([1], row_tokens=1, rows_per_micro_batch=1, num_ranks=0)
    with pytest.raises(UsageError, match="every sequence needs at least 1 token"):
        plan_packing([1, 0], row_tokens=1, rows_per_micro_batch=1, num_ranks=1)
