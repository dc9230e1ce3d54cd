"""Which holder sends: the deliveries of a cell go round its holders. Called by `reshard.runs`.

Floor 1.

A cell of n layers has M living holders and C far consumers (those who hold it themselves copy it).
With P = M / gcd(C, M), C * P deliveries t = c + C * j go round the holders in whole turns:

    holder of delivery t = (t + start) mod M          for consumer c < C and j < P

Delivery (c, j) is every P-th layer from j on; the n mod P layers that are left over are cut in P
chunks, and chunk j goes with it. So all holders send the same, and both ends can solve for the
other without asking anyone. `start` is salted by the class's name: the order of tensors plays no
part.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from shardloop.layout.strips import Ints
from shardloop.reshard.flow import Flow, Route
from shardloop.reshard.sides import NOBODY


@dataclass(frozen=True, kw_only=True, eq=False)
class Turns:
    """The turns of the product of some cells of each block; arrays by cell of the product."""

    flow: Flow
    cells: list[Ints]
    """Of each block."""
    num_consumers: Ints
    """The far ones."""
    num_holders: Ints
    """The living ones."""
    near: Ints
    """[*, cells]: numbers of the consumers that hold the cell, increasing, then NOBODY."""
    lost: Ints
    """[*, cells]: numbers of the holders that are lost, likewise."""

    @staticmethod
    def of(route: Route, flow: Flow, cells: list[Ints]) -> "Turns":
        wants = opened(cells)
        holds = opened(atoms_of(flow, cells))
        num_consumers, num_holders = flow.consumers.count(wants), flow.holders.count(holds)
        lost = flow.holders.number(holds, route.lost_index)
        near = np.empty((*num_holders.shape[:-1], 0), dtype=np.int64)
        if route.shares_ranks:
            number = np.arange(num_holders.max(initial=0))
            ranks, _ = flow.holders.at(holds, number % num_holders)
            twins = np.where(number < num_holders, route.twin[ranks], -1)
            near = flow.consumers.number(wants, np.maximum(twins, 0))
            near = np.where(twins < 0, NOBODY, near)
        near, lost = _increasing(near), _increasing(lost)
        return Turns(
            flow=flow,
            cells=cells,
            num_consumers=num_consumers.reshape(-1) - (near < NOBODY).sum(axis=0),
            num_holders=num_holders.reshape(-1) - (lost < NOBODY).sum(axis=0),
            near=near,
            lost=lost,
        )

    def cells_at(self, cell: Ints) -> list[Ints]:
        """The cell of each block, by cell of the product."""
        index = np.unravel_index(cell, [len(choice) for choice in self.cells])
        return [choice[i] for choice, i in zip(self.cells, index, strict=True)]

    @cached_property
    def period(self) -> Ints:
        """P."""
        return self.num_holders // self._gcd

    @cached_property
    def num_deliveries(self) -> Ints:
        """Of each holder."""
        return self.num_consumers // self._gcd

    @cached_property
    def _gcd(self) -> Ints:
        return np.maximum(np.gcd(self.num_consumers, self.num_holders), 1)

    @cached_property
    def start(self) -> Ints:
        """By cell, differing from cell to cell and from class to class."""
        return sum(opened(self.cells), np.array(self.flow.salt)).reshape(-1)

    def holder(self, cell: Ints, consumer: Ints, j: Ints) -> Ints:
        """Who brings delivery j; numbers of consumer and holder count all of the cell."""
        consumer = _squeezed(consumer, self.near[:, cell])
        t = consumer + self.num_consumers[cell] * j + self.start[cell]
        return _stretched(t % self.num_holders[cell], self.lost[:, cell])

    def delivery(self, cell: Ints, holder: Ints, i: Ints) -> tuple[Ints, Ints]:
        """The i-th delivery of a holder: to which consumer, and its j. The inverse of `holder`."""
        num_holders = self.num_holders[cell]
        holder = _squeezed(holder, self.lost[:, cell])
        t = (holder - self.start[cell]) % num_holders + num_holders * i
        j, consumer = np.divmod(t, self.num_consumers[cell])
        return _stretched(consumer, self.near[:, cell]), j


def atoms_of(flow: Flow, cells: list[Ints]) -> list[Ints]:
    """The atom that each cell is part of, by block."""
    return [step.cell_atom[cell] for step, cell in zip(flow.joins, cells, strict=True)]


def opened(choices: list[Ints]) -> list[Ints]:
    """An open grid of all combinations, with a last axis more."""
    num = len(choices)
    return [c.reshape((1,) * i + (-1,) + (1,) * (num - i)) for i, c in enumerate(choices)]


def _increasing(numbers: Ints) -> Ints:
    """[..., *] -> [*, cells]: sorted, with as many as the cell that has most."""
    numbers = np.sort(numbers.reshape(prod(numbers.shape[:-1]), numbers.shape[-1])).T
    return numbers[(numbers < NOBODY).any(axis=1)]


def _squeezed(number: Ints, left_out: Ints) -> Ints:
    """Numbers counted without those left out, which are given one after the other, increasing."""
    for left in left_out[::-1]:
        number = number - (left < number)
    return number


def _stretched(number: Ints, left_out: Ints) -> Ints:
    """The inverse of `_squeezed`."""
    for left in left_out:
        number = number + (left <= number)
    return number
