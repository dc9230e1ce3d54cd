"""Weights of tokens: against loops over rows and prompts, and what they add up to."""

import pytest
import torch
from torch import Tensor

from shardloop.config import Aggregation
from shardloop.errors import UsageError
from shardloop.rl.aggregation import token_scales

KINDS: list[Aggregation] = ["token-mean", "sequence-mean", "sequence-sum", "prompt-mean"]


def scales_of(
    kind: Aggregation, mask_N: Tensor, lengths: list[int], groups: list[int], constant: int = 7
) -> Tensor:
    return token_scales(
        kind,
        mask_N=mask_N,
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        group_B=torch.tensor(groups),
        constant=constant if kind == "sequence-sum" else None,
    )


def slow_loss(
    kind: Aggregation, losses: list[list[float]], groups: list[int], constant: int = 7
) -> float:
    """Of the loss tokens of each row, as the definitions read."""
    rows = [row for row in losses if row]
    if kind == "token-mean":
        tokens = [loss for row in rows for loss in row]
        return sum(tokens) / len(tokens)
    if kind == "sequence-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if kind == "sequence-sum":
        return sum(sum(row) for row in rows) / (constant * len(rows))
    prompts: dict[int, list[float]] = {}
    for group, row in zip(groups, losses, strict=True):
        if row:
            prompts.setdefault(group, []).extend(row)
    return sum(sum(tokens) / len(tokens) for tokens in prompts.values()) / len(prompts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_weighted_sum_is_the_definition(kind: Aggregation, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (8,), generator=generator).tolist()
    groups = torch.randint(0, 4, (8,), generator=generator).tolist()
    mask_N = torch.rand(sum(lengths), generator=generator) < 0.5
    mask_N[: lengths[0]] = False
    mask_N[-1] = True
    losses_N = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    rows = [
        losses[mask].tolist()
        for losses, mask in zip(losses_N.split(lengths), mask_N.split(lengths), strict=True)
    ]
    scales_N = scales_of(kind, mask_N, lengths, groups)
    assert (scales_N * losses_N).sum().item() == pytest.approx(slow_loss(kind, rows, groups))
    assert not scales_N[~mask_N].any()
    if kind != "sequence-sum":
        assert scales_N.sum().item() == pytest.approx(1.0, rel=1e-14)


@pytest.mark.parametrize(
    ("kind", "groups", "loss"),
    [
        ("token-mean", [0, 0], 0.5),
        ("sequence-mean", [0, 0], 0.0),
        ("prompt-mean", [0, 0], 0.5),
        ("prompt-mean", [0, 1], 0.0),
        ("sequence-sum", [0, 0], 0.25),
    ],
)
def test_rows_of_1_and_3_tokens(kind: Aggregation, groups: list[int], loss: float) -> None:
    losses_N = torch.tensor([-1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    mask_N = torch.ones(4, dtype=torch.bool)
    scales_N = scales_of(kind, mask_N, [1, 3], groups, constant=4)
    assert (scales_N * losses_N).sum().item() == pytest.approx(loss, abs=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_loss_tokens_changes_nothing(kind: Aggregation) -> None:
    mask_N = torch.tensor([True, True, False, True])
    small_N = scales_of(kind, mask_N, [2, 2], [0, 1])
    longer_N = torch.cat([mask_N, torch.zeros(3, dtype=torch.bool)])
    large_N = scales_of(kind, longer_N, [2, 2, 3], [0, 1, 2])
    assert torch.equal(large_N[:4], small_N)


@pytest.mark.parametrize("kind", KINDS)
def test_no_loss_tokens_have_no_weight(kind: Aggregation) -> None:
    scales_N = scales_of(kind, torch.zeros(4, dtype=torch.bool), [2, 2], [0, 0])
    assert scales_N.tolist() == [0.0] * 4


def test_prompts_are_told_apart_by_number_and_not_by_place() -> None:
    mask_N = torch.ones(6, dtype=torch.bool)
    scales_N = scales_of("prompt-mean", mask_N, [1, 2, 3], [9, 4, 9])
    assert scales_N.tolist() == pytest.approx([1 / 8, 1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 8])


def test_bad_arguments_are_refused() -> None:
    ones = torch.ones(2, dtype=torch.bool)
    arguments = {"mask_N": ones, "offsets": torch.tensor([0, 2]), "group_B": torch.tensor([0])}
    with pytest.raises(UsageError, match="kind='mean'; choose token-mean"):
        token_scales("mean", **arguments, constant=None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="sequence-sum needs 1 or more, others None"):
        token_scales("sequence-sum", **arguments, constant=None)
    with pytest.raises(UsageError, match="constant=3 with kind='token-mean'"):
        token_scales("token-mean", **arguments, constant=3)
    with pytest.raises(UsageError, match="one group per row"):
        token_scales(
            "token-mean", mask_N=ones, offsets=torch.tensor([0, 2]), group_B=ones, constant=None
        )
