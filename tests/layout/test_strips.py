"""Strips: cutting is torch's chunking, and nothing is lost on the way."""

import pytest
import torch

from shardloop.layout.strips import OWN, Segment, cat, length, pad, split, take, whole


@pytest.mark.parametrize("num_parts", range(1, 10))
@pytest.mark.parametrize("size", [1, 2, 7, 8, 20])
def test_split_is_torch_chunk_with_empty_parts_at_the_end(size: int, num_parts: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(num_parts)]
    chunks += [[]] * (num_parts - len(chunks))
    parts = split(whole(OWN, 0, size), num_parts)
    assert [[x for s in part for x in range(s.lo, s.hi)] for part in parts] == chunks


def test_twenty_rows_over_eight_ranks() -> None:
    assert [length(part) for part in split(whole(OWN, 0, 20), 8)] == [3, 3, 3, 3, 3, 3, 2, 0]


def test_parts_of_a_fused_strip_join_to_the_whole() -> None:
    strip = pad(cat(whole("q", 0, 5), whole("k", 2, 4), whole("v", 0, 3)), 12)
    for num_parts in range(1, 15):
        elements = [
            (s.key, x) for part in split(strip, num_parts) for s in part for x in range(s.lo, s.hi)
        ]
        assert [e for e in elements if e[0]] == [
            *(("q", x) for x in range(5)),
            *(("k", x) for x in range(2, 4)),
            *(("v", x) for x in range(3)),
        ]
        assert len(elements) == 12


def test_take_keeps_the_coordinates_of_its_class() -> None:
    strip = cat(whole("q", 10, 14), whole("k", 0, 3))
    assert take(strip, 3, 6) == (Segment("q", 13, 14), Segment("k", 0, 2))
