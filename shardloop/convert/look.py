"""What a checkpoint holds, as data: groups of tensors, files, and where one tensor lies. Floor 3.

Called by `shardloop checkpoint inspect`, which prints it. No weights are read.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

from shardloop.convert.sources import Source
from shardloop.convert.store import Reader, Stored
from shardloop.errors import UsageError
from shardloop.layout.layout import Box

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=\.weight)\d+$|(?<=\.bias)\d+$")
"""A layer or an expert within a name."""


@dataclass(kw_only=True)
class Group:
    """Tensors whose names differ in numbers alone."""

    name: str
    """With the runs of each number in braces."""
    count: int = 0
    """Of tensors; one that several ranks hold parts of counts for each."""
    num_bytes: int = 0
    shapes: dict[tuple[int, ...], None] = field(default_factory=dict)
    """Each that occurs; so with the dtypes and the ranks that have some."""
    dtypes: dict[str, None] = field(default_factory=dict)
    ranks: dict[int, None] = field(default_factory=dict)

    def add(self, rank: int, stored: Stored) -> None:
        self.count += 1
        self.num_bytes += stored.num_bytes
        self.shapes[stored.shape] = None
        self.dtypes[str(stored.dtype).removeprefix("torch.")] = None
        self.ranks[rank] = None


class Place(NamedTuple):
    """A box of a tensor and where it is."""

    rank: int
    local_name: str
    box: Box
    file: Path


def groups(reader: Reader) -> list[Group]:
    """All tensors of a checkpoint, in the order in which it has them."""
    found: dict[str, Group] = {}
    numbers: dict[str, list[set[int]]] = {}
    for rank, name, stored in reader.everything():
        template = _NUMBER.sub("{}", name)
        found.setdefault(template, Group(name=template)).add(rank, stored)
        here = [int(match[0]) for match in _NUMBER.finditer(name)]
        for seen, number in zip(
            numbers.setdefault(template, [set() for _ in here]), here, strict=True
        ):
            seen.add(number)
    for template, group in found.items():
        group.name = template.replace("{}", "{{{}}}").format(*map(runs, numbers[template]))
    return list(found.values())


def runs(numbers: Iterable[int]) -> str:
    """Numbers as text: 0-3,8."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{lo}" if lo == hi else f"{lo}-{hi}" for lo, hi in parts)


def files(reader: Reader) -> dict[Path, int]:
    """Every file that has tensors, with its bytes."""
    found = {file for _, _, stored in reader.everything() for file in stored.files}
    return {file: file.stat().st_size for file in sorted(found)}


def places(reader: Reader, source: Source | None, name: str) -> list[Place]:
    """Where a tensor lies: boxes of the whole tensor if its model is known, of ranks' tensors else.

    Args:
        source: the reader with its model, where that is known and fits.
        name: canonical, or as the checkpoint has it.
    Raises:
        UsageError: there is no such tensor.
    """
    found = [] if source is None else list(_canonical(source, name))
    found = found or [
        Place(rank, local, box, file)
        for rank, local, _ in reader.everything()
        if local == name
        for box, file in reader.chunks(rank, local)
    ]
    if not found:
        known = [local for _, local, _ in reader.everything()]
        like = [local for local in known if name.split(".")[-2:] == local.split(".")[-2:]]
        raise UsageError(
            f"tensor={name!r} is not in {reader.path}; it has {', '.join((like or known)[:3])}, ..."
        )
    return found


def _canonical(source: Source, name: str) -> Iterator[Place]:
    layout, reader = source.layout, source.reader
    if name not in layout.model.tensor_shapes():
        return
    for rank in range(layout.world_size):
        tensors = source.tensors(rank)
        for piece in layout.pieces(rank):
            if piece.name != name or not prod(hi - lo for lo, hi in piece.box):
                continue
            local = piece.local_name
            if layout.world_size == 1 and local == name:
                for box, file in reader.chunks(rank, local):
                    yield Place(rank, local, box, file)
            else:
                yield Place(rank, local, piece.box, tensors[local].files[0])
