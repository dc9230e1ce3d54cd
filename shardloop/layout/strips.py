"""Strips: what lies along one dim of a local tensor, in order. Called by `layout.schemes`. Floor 1.

A strip is a sequence of segments; a segment is a run lo:hi of a class's dim, or padding. Six small
functions write every layout: whole, cat, pad, take, split, length.

    split(whole(OWN, 0, 20), 8)   ->  3 3 3 3 3 3 2 0 rows, as torch.chunk cuts them
"""

from typing import NamedTuple

OWN = "*"
"""Key of the local tensor's own class, where the dim does not say which of several it is."""


class Segment(NamedTuple):
    key: str | None
    """Key of a tensor class, OWN, or None for padding."""
    lo: int
    hi: int


Strip = tuple[Segment, ...]


def whole(key: str, lo: int, hi: int) -> Strip:
    return (Segment(key, lo, hi),) if hi > lo else ()


def cat(*strips: Strip) -> Strip:
    return tuple(segment for strip in strips for segment in strip)


def length(strip: Strip) -> int:
    return sum(segment.hi - segment.lo for segment in strip)


def pad(strip: Strip, size: int) -> Strip:
    """The strip with padding at its end, up to `size`."""
    missing = size - length(strip)
    assert missing >= 0, f"cannot pad {length(strip)} elements to {size}"
    return (*strip, Segment(None, 0, missing)) if missing else strip


def take(strip: Strip, start: int, stop: int) -> Strip:
    """The part start:stop of the strip."""
    taken, begin = [], 0
    for segment in strip:
        end = begin + segment.hi - segment.lo
        first, last = max(start, begin), min(stop, end)
        if first < last:
            taken.append(
                Segment(segment.key, segment.lo + first - begin, segment.lo + last - begin)
            )
        begin = end
    return tuple(taken)


def split(strip: Strip, num_parts: int) -> list[Strip]:
    """Cut into `num_parts` chunks of ceil(n / num_parts): the last ones may be short or empty."""
    size = -(-length(strip) // num_parts)
    return [take(strip, part * size, (part + 1) * size) for part in range(num_parts)]
