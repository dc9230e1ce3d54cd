"""The copies of every element of a layout, numbered by table. Called by `fingerprint`. Floor 1.

A rank finds its own copies and asks for no other's: along each cut a box of its rows is one of the
holders of an atom (see `join`), and its number among all holders of a product of atoms is that of a
mixed radix, the free ranks fastest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from shardloop.errors import PlanError
from shardloop.families.base import TensorClass
from shardloop.layout.layout import Box, Layout, LocalTensor, Row, View, view_of
from shardloop.layout.tables import make_table, offsets
from shardloop.reshard.join import Join, join


class Copy(NamedTuple):
    """A box of one canonical tensor that a rank holds."""

    tensor_class: TensorClass
    layer: int
    expert: int
    box: Box
    """In the tensor's own dims."""
    view: View
    source: int
    """Which of the local tensors that have this canonical tensor; several where it is tied."""
    num_sources: int
    ordinal: int
    """Its number among the copies in ranks of this source, ..."""
    number: int
    """... and how many these are."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Holding:
    """One class in one local tensor: for each cut its table, joined with itself."""

    tensor_class: TensorClass
    tensor: LocalTensor
    steps: tuple[Join, ...]
    layers: frozenset[int]
    experts: frozenset[int]

    @staticmethod
    def of(tensor_class: TensorClass, tensor: LocalTensor) -> "Holding":
        tables = [make_table(cut, tensor_class.key) for cut in tensor.cuts]
        steps = tuple(join(table, table) for table in tables)
        layers, experts = (
            frozenset(
                n for lo, hi in zip(s.atom_lo, s.atom_hi, strict=True) for n in range(*lo, *hi)
            )
            for s in steps[:2]
        )
        return Holding(
            tensor_class=tensor_class, tensor=tensor, steps=steps, layers=layers, experts=experts
        )

    def faults(self) -> Iterator[str]:
        """Why its copies cannot be numbered; a text each."""
        here = f"{self.tensor_class.key} in {self.tensor.template}"
        domain = self.tensor_class.domain
        for cut, step in zip(self.tensor.cuts, self.steps, strict=True):
            whole = [domain[dim] for dim in cut.dims]
            volume = int(np.prod(step.atom_hi - step.atom_lo, axis=1).sum())
            inside = all(
                lo <= step.src.lo[:, i].min(initial=lo) and step.src.hi[:, i].max(initial=hi) <= hi
                for i, (lo, hi) in enumerate(whole)
            )
            is_own = cut.dims[0] not in (0, 1)
            if not inside or (is_own and volume != prod(hi - lo for lo, hi in whole)):
                yield f"{here}: its boxes do not cover dims {cut.dims}, {whole}"
            if len(step.row) != len(step.holder_row):
                yield f"{here}: a rank holds some elements of dims {cut.dims} twice"

    def shows(self, layer: int, expert: int) -> bool:
        return layer in self.layers and expert in self.experts

    def places(self, rank: int) -> Iterator[tuple[tuple[Row, ...], Box, int, int]]:
        """Rows of a rank, a box within them, its ordinal and the number of its copies."""
        parts = [cut.part(rank) for cut in self.tensor.cuts]
        free = np.sort(offsets(self.tensor.free_axes)).tolist()
        mine = free.index(rank - sum(parts))
        key = self.tensor_class.key
        held = [_held(step, part, key) for step, part in zip(self.steps, parts, strict=True)]
        for combination in product(*held):
            ordinal = 0
            for _, _, index, count in combination:
                ordinal = ordinal * count + index
            number = prod(count for *_, count in combination) * len(free)
            box = tuple(run for _, atom, *_ in combination for run in atom)
            yield tuple(row for row, *_ in combination), box, ordinal * len(free) + mine, number


def _held(step: Join, part: int, key: str) -> list[tuple[Row, Box, int, int]]:
    """Each atom that a part holds: the row it lies in, its box, the holder's index and number."""
    found = []
    for pair in np.flatnonzero(step.src.part[step.row] == part).tolist():
        row, atom = int(step.row[pair]), int(step.atom[pair])
        holders = step.holder_row[step.holder_start[atom] : step.holder_start[atom + 1]].tolist()
        runs = _runs(step.src.lo[row], step.src.hi[row])
        place = Row(key, runs, int(step.src.loc[row, 0]))
        box = _runs(step.lo[pair], step.hi[pair])
        found.append((place, box, holders.index(row), len(holders)))
    return found


def _runs(lo: np.ndarray, hi: np.ndarray) -> Box:
    return tuple(zip(lo.tolist(), hi.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Copies:
    """Who holds what of a layout, as tables: the same size for any number of replicas."""

    names: tuple[str, ...]
    """Canonical tensor names, sorted: the order of every vector of fingerprints."""
    holdings: dict[str, list[Holding]]
    """By class; several where the class is tied, or its layers have different names."""
    most_sources: int
    """Local tensors that have the same canonical tensor, at most."""

    def of(self, rank: int) -> Iterator[Copy]:
        """All that a rank holds, each element in one copy; padding is in none."""
        for holdings in self.holdings.values():
            for holding in holdings:
                yield from self._of(holding, holdings, rank)

    def _of(self, holding: Holding, holdings: list[Holding], rank: int) -> Iterator[Copy]:
        for rows, (layers, experts, *box), ordinal, number in holding.places(rank):
            for layer, expert in product(range(*layers), range(*experts)):
                sources = [h for h in holdings if h.shows(layer, expert)]
                yield Copy(
                    tensor_class=holding.tensor_class,
                    layer=layer,
                    expert=expert,
                    box=tuple(box),
                    view=view_of(holding.tensor, rows, (layer, expert), tuple(box)),
                    source=sources.index(holding),
                    num_sources=len(sources),
                    ordinal=ordinal,
                    number=number,
                )


def find_copies(layout: Layout) -> Copies:
    """Number the copies of every element of a layout; it reads its tables and visits no rank.

    Raises:
        PlanError: a local tensor that shows a class does not hold all of it, or holds an element
            twice; all of them are named.
    """
    classes = layout.model.classes
    holdings = {
        c.key: [Holding.of(c, t) for t in layout.tensors if c.key in t.keys] for c in classes
    }
    faults = [text for group in holdings.values() for h in group for text in h.faults()]
    most = 1
    for c in classes:
        numbers = product(range(*c.layers), range(*c.experts))
        counts = {n: sum(h.shows(*n) for h in holdings[c.key]) for n in numbers}
        faults += [f"{c.name(*n)}: no rank holds it" for n, count in counts.items() if not count]
        most = max(most, *counts.values())
    if faults:
        raise PlanError(
            f"layout {layout.spec!r} has no fingerprint; every element must lie in a tensor that "
            "holds its class, once on a rank:\n" + "\n".join(f"  {fault}" for fault in faults)
        )
    names = tuple(sorted(layout.model.tensor_shapes()))
    return Copies(names=names, holdings=holdings, most_sources=most)
