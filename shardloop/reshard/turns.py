"""One rank's list of transfers, and which holder sends. Called by `Plan`. Floor 1.

A cell of a layer has M holders and C consumers. A consumer that holds the cell copies it to itself;
otherwise consumer c is served by holder

    k = (c + C * (cell + layer)) mod M

so the work moves over all replicas, and a source can solve for its consumers without asking anyone.
`cell` is salted by the class's name, so the order of tensors plays no part.
"""

from collections.abc import Iterator
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from shardloop.layout.layout import Layout, LocalTensor
from shardloop.layout.tables import Axis, offsets
from shardloop.reshard.flow import Flow, Route, Run, Transfer, View
from shardloop.reshard.join import Pair


def transfers_to(route: Route, dst: int) -> list[Transfer]:
    return _written_out(route, runs_to(route, dst))


def transfers_from(route: Route, src: int) -> list[Transfer]:
    return _written_out(route, runs_from(route, src))


def runs_to(route: Route, dst: int) -> Iterator[Run]:
    """What rank `dst` of the destination layout receives."""
    own = route.src_index.get(route.dst_ranks[dst])
    for flow in route.flows:
        free = _free(flow.dst, route.dst)
        ordinal = free.index(dst - _cut_part(flow.dst, dst))
        lists = [
            step.pairs_to.get(cut.part(dst), ())
            for step, cut in zip(flow.joins, flow.dst.cuts, strict=True)
        ]
        for pairs in product(*lists):
            yield from _runs_of_consumer(route, flow, pairs, dst, ordinal, own)


def runs_from(route: Route, src: int) -> Iterator[Run]:
    """What rank `src` of the source layout sends: the same rule, solved from the other side."""
    own = route.dst_index.get(route.src_ranks[src])
    for flow in route.flows:
        lists = [
            step.pairs_from.get(cut.part(src), ())
            for step, cut in zip(flow.joins, flow.src.cuts, strict=True)
        ]
        for pairs in product(*lists):
            yield from _runs_of_holder(route, flow, pairs, src, own)


def _runs_of_consumer(
    route: Route,
    flow: Flow,
    pairs: tuple[Pair, ...],
    dst: int,
    ordinal: int,
    own: int | None,
) -> Iterator[Run]:
    layers = range(pairs[0].lo, pairs[0].hi)
    if own is not None and _holds(flow, pairs, own):
        yield _run(flow, pairs, own, dst, layers)
        return
    turn = _Turn.of(route, flow, pairs)
    consumer = turn.first + ordinal
    for offset in range(min(turn.period, len(layers))):
        holder = turn.holder(consumer, layers[offset])
        yield _run(flow, pairs, turn.sources[holder], dst, layers[offset :: turn.period])


def _runs_of_holder(
    route: Route, flow: Flow, pairs: tuple[Pair, ...], src: int, own: int | None
) -> Iterator[Run]:
    layers = range(pairs[0].lo, pairs[0].hi)
    turn = _Turn.of(route, flow, pairs)
    mine = turn.sources.index(src)
    base = sum(pair.dst_part for pair in pairs)
    for ordinal, free in enumerate(_free(flow.dst, route.dst)):
        dst = base + free
        if dst == own:
            yield _run(flow, pairs, src, dst, layers)
            continue
        near = route.src_index.get(route.dst_ranks[dst])
        if near is not None and _holds(flow, pairs, near):
            continue
        consumer = turn.first + ordinal
        for offset in range(min(turn.period, len(layers))):
            if turn.holder(consumer, layers[offset]) == mine:
                yield _run(flow, pairs, src, dst, layers[offset :: turn.period])


class _Turn(NamedTuple):
    """The numbers of one cell: who holds it, how many want it, and where the turn starts."""

    sources: list[int]
    """The M holders, as source layout ranks."""
    num_consumers: int
    first: int
    """Number of the first free consumer of these pairs."""
    cell: int
    period: int
    """The turn repeats after this many layers."""

    @staticmethod
    def of(route: Route, flow: Flow, pairs: tuple[Pair, ...]) -> "_Turn":
        free = _free(flow.src, route.src)
        parts = product(free, *(pair.holder_parts for pair in pairs))
        sources = [sum(part) for part in parts]
        first = 0
        for pair in pairs:
            first = first * pair.mult + pair.turn
        num_free = len(_free(flow.dst, route.dst))
        num_consumers = num_free * prod(pair.mult for pair in pairs)
        cell = flow.salt + sum(pair.cell for pair in pairs)
        period = len(sources) // gcd(num_consumers, len(sources))
        return _Turn(sources, num_consumers, first * num_free, cell, period)

    def holder(self, consumer: int, layer: int) -> int:
        return (consumer + self.num_consumers * (self.cell + layer)) % len(self.sources)


def _run(flow: Flow, pairs: tuple[Pair, ...], src: int, dst: int, layers: range) -> Run:
    """The run of these pairs from `src`, which must hold them."""
    starts = []
    for pair, cut in zip(pairs, flow.src.cuts, strict=True):
        starts.append(pair.src_starts[pair.holder_parts.index(cut.part(src))])
    box = tuple((pair.lo, pair.hi) for pair in pairs[1:])
    dst_starts = tuple(pair.dst_start for pair in pairs[1:])
    return Run(flow, src, dst, layers, box, tuple(starts[1:]), dst_starts)


def _holds(flow: Flow, pairs: tuple[Pair, ...], src: int) -> bool:
    return all(
        cut.part(src) in pair.holder_parts for pair, cut in zip(pairs, flow.src.cuts, strict=True)
    )


def _free(tensor: LocalTensor, layout: Layout) -> list[int]:
    axes: tuple[Axis, ...] = tensor.free_axes(layout.mesh)
    return offsets(axes)


def _cut_part(tensor: LocalTensor, rank: int) -> int:
    return sum(cut.part(rank) for cut in tensor.cuts)


def _written_out(route: Route, runs: Iterator[Run]) -> list[Transfer]:
    """The transfers of runs, lower layers first, then by name, box and rank."""
    keyed = []
    for run in runs:
        tensor_class = run.flow.tensor_class
        ranks = route.src_ranks[run.src], route.dst_ranks[run.dst]
        shape = tuple(hi - lo for lo, hi in run.box)
        src_slices = _slices(run.src_starts, shape)
        dst_slices = _slices(run.dst_starts, shape)
        for layer in run.layers:
            src = View(run.flow.src.template.format(layer=layer), src_slices, shape)
            dst = View(run.flow.dst.template.format(layer=layer), dst_slices, shape)
            transfer = Transfer(*ranks, tensor_class.name(layer), run.box, src, dst)
            keyed.append(((layer, transfer.name, dst.local_name, run.box, ranks), transfer))
    return [transfer for _, transfer in sorted(keyed, key=lambda item: item[0])]


def _slices(starts: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))
