"""Runs written out as transfers, one per tensor and box, in the order of both ends. Floor 1.

Called by `Plan.sends` and `Plan.receives`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from shardloop.layout.layout import LocalTensor, Row, view_of
from shardloop.layout.tables import Table
from shardloop.reshard.flow import Blocks, Route, Runs, Transfer


def written_out(route: Route, runs: Iterable[Runs]) -> list[Transfer]:
    """The transfers of runs: lower layers first, then by class, expert, box and rank."""
    keyed = [entry for some in runs for entry in _transfers(route, some)]
    return [transfer for _, transfer in sorted(keyed, key=lambda entry: entry[0])]


def _transfers(route: Route, runs: Runs) -> Iterator[tuple[Any, Transfer]]:
    flow = runs.flow
    tensor_class, key = flow.tensor_class, (flow.key, flow.dst.template)
    src_rows = _Rows([step.src for step in flow.joins], flow.src, flow.blocks)
    dst_rows = _Rows([step.dst for step in flow.joins], (flow.dst,), flow.blocks)
    columns = (runs.src, runs.dst, runs.lo, runs.hi, runs.step, runs.src_row, runs.dst_row)
    for src, dst, lo, hi, step, src_row, dst_row in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        ranks = route.src_ranks[src], route.dst_ranks[dst]
        box = tuple(zip(lo[2:], hi[2:], strict=True))
        here, there = src_rows[tuple(src_row)], dst_rows[tuple(dst_row)]
        for expert in range(lo[1], hi[1]):
            first = lo[0], expert
            views = view_of(*here, first, box), view_of(*there, first, box)
            for layer in range(lo[0], hi[0], step):  # alike but for their names
                numbers = layer, expert
                transfer = Transfer(
                    *ranks,
                    tensor_class.name(*numbers),
                    box,
                    views[0].under(here[0].name(here[1], numbers)),
                    views[1].under(there[0].name(there[1], numbers)),
                    tensor_class.dtype,
                )
                yield (layer, *key, expert, box, ranks), transfer


class _Rows:
    """Products of table rows, given by the row of each block, as one row per cut."""

    def __init__(
        self, tables: list[Table], tensors: tuple[LocalTensor, ...], blocks: Blocks
    ) -> None:
        self._tables, self._tensors, self._blocks = tables, tensors, blocks
        self._known: dict[tuple[int, ...], tuple[LocalTensor, tuple[Row, ...]]] = {}

    def __getitem__(self, index: tuple[int, ...]) -> tuple[LocalTensor, tuple[Row, ...]]:
        """The local tensor, and its rows."""
        if index not in self._known:
            chosen = list(zip(self._tables, index, strict=True))
            tensor = self._tensors[sum(int(table.source[row]) for table, row in chosen)]
            rows = tuple(
                row
                for block, (table, at) in zip(self._blocks, chosen, strict=True)
                for row in _rows(tensor, block, table, at)
            )
            self._known[index] = tensor, rows
        return self._known[index]


def _rows(tensor: LocalTensor, block: tuple[int, ...], table: Table, at: int) -> Iterator[Row]:
    box = list(zip(table.lo[at].tolist(), table.hi[at].tolist(), strict=True))
    cuts = [cut for cut in tensor.cuts if cut.dims[0] in block]
    for cut, loc in zip(cuts, table.loc[at].tolist(), strict=True):
        first = cut.dims[0] - block[0]
        yield Row(tensor.keys[0], tuple(box[first : first + len(cut.dims)]), loc)
