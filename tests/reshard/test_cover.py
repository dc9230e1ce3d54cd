"""Covers: the quick answers are those of counting every element, for boxes of one to three dims."""

import random

import numpy as np
import pytest

from shardloop.reshard.proof.cover import holes, sweep, wrong_rows

SIDE = 6
Box = tuple[tuple[int, int], ...]


def cut_up(box: Box, rng: random.Random) -> list[Box]:
    """Disjoint boxes that make up a box, in any order."""
    dim = rng.randrange(len(box))
    lo, hi = box[dim]
    if hi - lo < 2 or rng.random() < 0.2:
        return [box]
    at = rng.randrange(lo + 1, hi)
    parts = ((*box[:dim], run, *box[dim + 1 :]) for run in ((lo, at), (at, hi)))
    found = [piece for part in parts for piece in cut_up(part, rng)]
    rng.shuffle(found)
    return found


def random_box(num_dims: int, rng: random.Random) -> Box:
    ends = (sorted(rng.sample(range(SIDE + 1), 2)) for _ in range(num_dims))
    return tuple((lo, hi) for lo, hi in ends)


def disturb(boxes: list[Box], rng: random.Random) -> list[Box]:
    """Perhaps drop, double, move, stretch or exchange a box."""
    boxes = list(boxes)
    i, kind = rng.randrange(len(boxes)), rng.randrange(6)
    dim, by = rng.randrange(len(boxes[i])), rng.choice([-1, 1])
    (lo, hi), old = boxes[i][dim], boxes[i]
    if kind == 0:
        boxes.pop(i)
    elif kind == 1:
        boxes.append(old)
    elif kind == 2:
        boxes[i] = (*old[:dim], (lo + by, hi + by), *old[dim + 1 :])
    elif kind == 3:
        boxes[i] = (*old[:dim], (lo, hi + by), *old[dim + 1 :])
    elif kind == 4:
        boxes[i] = boxes[rng.randrange(len(boxes))]
    return boxes


def counts(boxes: list[Box], num_dims: int) -> np.ndarray:
    """How often each element lies in a box, with room for those that were moved out."""
    found = np.zeros([SIDE + 2] * num_dims, dtype=int)
    for box in boxes:
        found[tuple(slice(lo + 1, hi + 1) for lo, hi in box)] += 1
    return found


def corners(boxes: list[Box], num_dims: int) -> tuple[np.ndarray, np.ndarray]:
    both = np.array(boxes, dtype=np.int64).reshape(-1, num_dims, 2)
    return both[..., 0], both[..., 1]


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_rows_are_wrong_where_elements_are_not_counted_once(num_dims: int, seed: int) -> None:
    rng = random.Random(f"{seed} {num_dims}")
    num_wrong = 0
    for _ in range(150):
        rows = [random_box(num_dims, rng) for _ in range(4)]
        groups = [disturb(cut_up(row, rng), rng) for row in rows]
        wrong = [
            any(lo >= hi for box in group for lo, hi in box)
            or not np.array_equal(counts(group, num_dims), counts([row], num_dims))
            for row, group in zip(rows, groups, strict=True)
        ]
        pairs = [(index, box) for index, group in enumerate(groups) for box in group]
        rng.shuffle(pairs)
        row = np.array([index for index, _ in pairs], dtype=np.int64)
        boxes = corners([box for _, box in pairs], num_dims)
        found = wrong_rows(row, *boxes, *corners(rows, num_dims))
        assert found.tolist() == np.flatnonzero(wrong).tolist()
        num_wrong += sum(wrong)
    assert 200 < num_wrong < 500


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_holes_are_the_elements_in_no_box(num_dims: int, seed: int) -> None:
    rng = random.Random(f"{seed} {num_dims}")
    for _ in range(60):
        domain = random_box(num_dims, rng)
        boxes = cut_up(domain, rng)
        boxes = rng.sample(boxes, k=rng.randrange(len(boxes) + 1)) + boxes[: rng.randrange(9)]
        left = counts(holes(*corners(boxes, num_dims), domain), num_dims)
        covered = counts(boxes, num_dims) > 0
        assert np.array_equal(left, counts([domain], num_dims) * ~covered)


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_a_sweep_meets_every_element_of_every_box_once(num_dims: int, seed: int) -> None:
    rng = random.Random(f"{seed} {num_dims}")
    for _ in range(40):
        boxes = [random_box(num_dims, rng) for _ in range(rng.randrange(1, 6))]
        again = [box for box, members in sweep(*corners(boxes, num_dims)) for _ in members]
        assert np.array_equal(counts(again, num_dims), counts(boxes, num_dims))


def test_a_dim_may_have_any_number_of_elements() -> None:
    """A terabyte in one dim: random numbers are drawn for the ends of boxes alone."""
    size = 2**40
    boxes = corners([((0, size // 3), (0, 5)), ((size // 3, size), (0, 5))], 2)
    whole = corners([((0, size), (0, 5))], 2)
    row = np.zeros(2, dtype=np.int64)
    assert not len(wrong_rows(row, *boxes, *whole))
    assert len(wrong_rows(row, boxes[0] + [[0, 0], [1, 0]], boxes[1], *whole))


def test_boxes_outside_of_their_row_are_wrong_wherever_they_lie() -> None:
    whole = corners([((4, 8), (0, 5))], 2)
    for box in (((9, 12), (0, 5)), ((0, 2), (0, 5)), ((4, 8), (7, 9)), ((8, 4), (0, 5))):
        assert wrong_rows(np.zeros(1, dtype=np.int64), *corners([box], 2), *whole).tolist() == [0]
