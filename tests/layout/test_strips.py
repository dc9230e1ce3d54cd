"""Strips: each combinator against lists of single elements, written out one by one."""

import random

import numpy as np
import pytest
import torch

from shardloop.layout.strips import (
    OWN,
    PADDING,
    Strips,
    blocks,
    cat,
    clip,
    flat,
    pad,
    pick,
    split,
    whole,
)

SEEDS = range(20)
Element = tuple[str, tuple[int, ...]] | None


def elements(strips: Strips) -> list[list[Element]]:
    """Every element of every part: its key and place, None where it is padding."""
    found: list[list[Element]] = [[] for _ in range(strips.num_parts)]
    for part, key, lo, hi in zip(strips.part, strips.key, strips.lo, strips.hi, strict=True):
        for place in np.ndindex(*(hi - lo)):
            at = tuple((lo + place).tolist())
            found[part].append(None if key == PADDING else (strips.keys[key], at))
    return found


def some_strips(
    rng: random.Random, *, num_parts: int, num_dims: int, padded: bool = True
) -> Strips:
    """Several boxes of several classes in each part, in no order."""
    boxes = []
    for _ in range(rng.randint(1, 4)):
        lo = [rng.randint(0, 5) for _ in range(num_dims)]
        runs = [(a, a + rng.randint(0, 4)) for a in lo]
        boxes.append(split(whole(rng.choice("ab" + OWN), *runs), num_parts))
    strips = cat(*boxes)
    return pad(strips, int(strips.length.max()) + rng.randint(0, 3)) if padded else strips


def cases(seed: int, **kind: bool) -> tuple[random.Random, Strips]:
    rng = random.Random(seed)
    sizes = {"num_parts": rng.randint(1, 4), "num_dims": rng.randint(1, 3)}
    return rng, some_strips(rng, **sizes, **kind)


def chunks(items: list[Element], num_parts: int) -> list[list[Element]]:
    size = -(-len(items) // num_parts)
    return [items[i * size : (i + 1) * size] for i in range(num_parts)]


@pytest.mark.parametrize("num_parts", range(1, 10))
@pytest.mark.parametrize("size", [1, 2, 7, 8, 20])
def test_split_is_torch_chunk_with_empty_parts_at_the_end(size: int, num_parts: int) -> None:
    expected = [chunk.tolist() for chunk in torch.arange(size).chunk(num_parts)]
    expected += [[]] * (num_parts - len(expected))
    parts = elements(split(whole(OWN, (0, size)), num_parts))
    assert [[e[1][0] for e in part if e] for part in parts] == expected


@pytest.mark.parametrize("num_parts", range(1, 10))
@pytest.mark.parametrize("shape", [(4, 3), (1, 7), (2, 3, 4), (5, 1, 2)])
def test_flat_split_is_torch_chunk_of_the_flattened(shape: tuple[int, ...], num_parts: int) -> None:
    places = [tuple(place) for place in np.ndindex(*shape)]
    expected = [[places[i] for i in chunk] for chunk in torch.arange(len(places)).chunk(num_parts)]
    expected += [[]] * (num_parts - len(expected))
    parts = elements(split(whole(OWN, *((0, n) for n in shape)), num_parts))
    assert [[e[1] for e in part if e] for part in parts] == expected


def test_twenty_rows_over_eight_ranks() -> None:
    assert split(whole(OWN, (0, 20)), 8).length.tolist() == [3, 3, 3, 3, 3, 3, 2, 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_split_chunks_each_part_whatever_lies_in_it(seed: int) -> None:
    rng, strips = cases(seed)
    num_parts = rng.randint(1, 6)
    expected = [chunk for part in elements(strips) for chunk in chunks(part, num_parts)]
    assert elements(split(strips, num_parts)) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_cat_lists_part_by_part(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {"num_parts": rng.randint(1, 4), "num_dims": rng.randint(1, 3)}
    three = [some_strips(rng, **sizes) for _ in range(3)]
    expected = [
        [e for part in parts for e in part]
        for parts in zip(*(elements(strips) for strips in three), strict=True)
    ]
    assert elements(cat(*three)) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_pad_fills_every_part_at_its_end(seed: int) -> None:
    rng, strips = cases(seed)
    size = int(strips.length.max()) + rng.randint(0, 5)
    expected = [part + [None] * (size - len(part)) for part in elements(strips)]
    assert elements(pad(strips, size)) == expected
    with pytest.raises(AssertionError, match="less than is there"):
        pad(strips, int(strips.length.max()) - 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_pick_copies_merges_and_drops_parts(seed: int) -> None:
    rng, strips = cases(seed)
    order = [
        [rng.randrange(strips.num_parts) for _ in range(rng.randint(0, 3))]
        for _ in range(rng.randint(1, 4))
    ]
    old = elements(strips)
    expected = [[e for part in parts for e in old[part]] for parts in order]
    assert elements(pick(strips, order)) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_turns_what_lies_outside_into_padding(seed: int) -> None:
    rng = random.Random(seed)
    strips = some_strips(rng, num_parts=rng.randint(1, 4), num_dims=1, padded=False)
    lo = rng.randint(0, 6)
    hi = lo + rng.randint(0, 5)
    expected = [
        [e if e and lo <= e[1][0] < hi else None for e in part] for part in elements(strips)
    ]
    assert elements(clip(strips, lo, hi)) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_are_those_that_a_segment_touches(seed: int) -> None:
    rng = random.Random(seed)
    strips = some_strips(rng, num_parts=rng.randint(1, 4), num_dims=1, padded=False)
    size = rng.randint(1, 4)
    expected: list[list[Element]] = [[] for _ in range(strips.num_parts)]
    for part, key, lo, hi in zip(strips.part, strips.key, strips.lo, strips.hi, strict=True):
        touched = dict.fromkeys(x // size for x in range(int(lo[0]), int(hi[0])))
        expected[part] += [(strips.keys[key], (block,)) for block in touched]
    assert elements(blocks(strips, size)) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_flat_is_every_combination_row_by_row(seed: int) -> None:
    rng = random.Random(seed)
    num_parts = rng.randint(1, 5)
    dims = [split(whole(OWN, (0, rng.randint(0, 6))), num_parts) for _ in range(rng.randint(1, 3))]
    expected: list[list[Element]] = []
    for parts in zip(*(elements(strips) for strips in dims), strict=True):
        places: list[tuple[int, ...]] = [()]
        for part in parts:
            places = [place + e[1] for place in places for e in part if e]
        expected.append([(OWN, place) for place in places])
    assert elements(flat(*dims)) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_loc_and_length_count_elements_and_padding(seed: int) -> None:
    _, strips = cases(seed)
    parts = elements(strips)
    assert strips.length.tolist() == [len(part) for part in parts]
    for s, key in enumerate(strips.key.tolist()):
        if key != PADDING:
            first = (strips.keys[key], tuple(strips.lo[s].tolist()))
            assert parts[strips.part[s]][strips.loc[s]] == first


def test_equal_content_is_equal_and_read_only() -> None:
    a, b = (split(whole("q", (0, 7)), 3) for _ in range(2))
    assert a == b and hash(a) == hash(b)
    assert a != split(whole("k", (0, 7)), 3)
    assert a != split(whole("q", (0, 7)), 4)
    with pytest.raises(ValueError, match="read-only"):
        a.lo[0, 0] = 1
