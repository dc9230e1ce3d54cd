"""Where one tensor lies on both sides of a plan, and which part of it goes where. Floor 5.

Made by `tensor_map` for `cli.reshard.picture`; knows nothing of drawing. A map has two dims: down
and across. Of a tensor these are its rows and columns, fused tensors one below the other; of all
experts of a layer, the expert and that dim of each which a layout cuts, fused ones side by side.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod

from shardloop.cli.reshard.tensor_choice import Choice, choose
from shardloop.families.base import TensorClass
from shardloop.layout.layout import Box, Layout, LocalTensor, Row, rows_of
from shardloop.layout.strips import OWN, PADDING
from shardloop.layout.tables import Cut
from shardloop.reshard.plan import Plan

MAX_RANKS = 16
"""Ranks drawn on a side; of more, the first."""
MAX_SEGMENTS = 96
"""Boxes drawn on a side, if there are several ranks: each has a line of text."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A box of a class within the bar of a rank."""

    key: str
    box: Box
    """Along the dims of the map, in elements (or experts) of the model."""
    start: int
    """How far down the bar it begins."""

    @property
    def size(self) -> int:
        return self.box[0][1] - self.box[0][0]


@dataclass(frozen=True, kw_only=True)
class Bar:
    """What one rank holds of the classes, one local tensor below the other."""

    rank: int
    length: int
    """Down: of whole local tensors, with padding and what else is fused in them."""
    segments: tuple[Segment, ...]
    padding: tuple[tuple[int, int], ...]
    """Rows that belong to no class."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """One transfer between two bars."""

    src_rank: int
    dst_rank: int
    key: str
    box: Box


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """The two columns of bars and what moves between them."""

    name: str
    """The local tensor or class that was asked for, with its numbers."""
    classes: tuple[TensorClass, ...]
    dims: tuple[int, ...]
    """The canonical dims down and across; 1 is the expert. A vector has none across."""
    hidden: tuple[int, ...]
    """Dims that a layout cuts and the map does not show."""
    src: tuple[Bar, ...]
    dst: tuple[Bar, ...]
    num_src: int
    """Ranks that hold some of it; `src` has the first of them."""
    num_dst: int
    copies: Mapping[str, int]
    """Of each class at the destination, where every element has equally many."""
    bands: tuple[Band, ...]

    @property
    def of_experts(self) -> bool:
        return self.dims[0] == 1


def tensor_map(plan: Plan, wanted: str | None = None) -> TensorMap:
    """The map of one tensor, or of all experts of a layer; see `choose` for what may be wanted.

    Raises:
        UsageError: as `choose`.
    """
    choice = choose(plan, wanted)
    cut_dims = _cut_dims(plan, choice)
    num_dims = len(choice.classes[0].domain)
    dims = (1, *(cut_dims or (2,))[:1]) if choice.has_experts else tuple(range(2, num_dims))
    dst = _bars(plan.dst, plan.dst_index, choice, dims)
    shown_dst = _first(dst)
    bands = [band for bar in shown_dst for band in _bands_to(plan, bar.rank, choice, dims)]
    senders = {band.src_rank for band in bands}
    src = _bars(plan.src, plan.src_index, choice, dims)
    senders_first = sorted(src, key=lambda bar: bar.rank not in senders)
    shown_src = sorted(_first(senders_first), key=src.index)
    shown = {bar.rank for bar in shown_src}
    return TensorMap(
        name=choice.name,
        classes=choice.classes,
        dims=dims,
        hidden=tuple(dim for dim in cut_dims if dim not in dims),
        src=tuple(shown_src),
        dst=tuple(shown_dst),
        num_src=len(src),
        num_dst=len(dst),
        copies=_copies(dst, choice, dims),
        bands=tuple(band for band in bands if band.src_rank in shown),
    )


def _first(bars: Sequence[Bar]) -> list[Bar]:
    """As many as can be drawn."""
    ends = accumulate(len(bar.segments) for bar in bars[:MAX_RANKS])
    return list(bars[: max(1, sum(end <= MAX_SEGMENTS for end in ends))])


def _cut_dims(plan: Plan, choice: Choice) -> tuple[int, ...]:
    """The tensor's own dims that a layout cuts, the destination's first."""
    keys = {c.key for c in choice.classes}
    cuts = [
        cut
        for layout in (plan.dst, plan.src)
        for tensor in layout.tensors
        if keys & set(tensor.keys)
        for cut in tensor.cuts
        if cut.axes
    ]
    own = range(2, len(choice.classes[0].domain))
    return tuple(dict.fromkeys(dim for cut in cuts for dim in cut.dims if dim in own))


def _bars(
    layout: Layout, ranks: Mapping[int, int], choice: Choice, dims: tuple[int, ...]
) -> list[Bar]:
    """The bars of all ranks that hold some of it, in the layout's order."""
    keys = {c.key for c in choice.classes}
    tensors = [tensor for tensor in layout.tensors if keys & set(tensor.keys)]
    found = []
    for rank, index in ranks.items():
        segments, padding, end = list[Segment](), list[tuple[int, int]](), 0
        for tensor in tensors:
            offset = 0 if choice.has_experts else end
            mine = list(_segments(tensor, index, choice, dims, offset))
            if not mine or {s.key for s in mine} & {s.key for s in segments}:
                continue  # nothing of it, or a tied tensor that is there already
            segments += mine
            end = max(end, *(segment.start + segment.size for segment in mine))
            if not choice.has_experts and len(tensor.cuts[2].dims) == 1:
                padding += _padding(tensor.cuts[2], index, offset)
                end = offset + int(tensor.cuts[2].strips.length[tensor.cuts[2].index(index)])
        if segments:
            found.append(
                Bar(rank=rank, length=end, segments=tuple(segments), padding=tuple(padding))
            )
    return found


def _segments(
    tensor: LocalTensor, index: int, choice: Choice, dims: tuple[int, ...], offset: int
) -> Iterator[Segment]:
    """What a rank has of the chosen classes in one local tensor."""
    wanted = {c.key for c in choice.classes}
    found = []
    for rows in product(*(rows_of(cut, index) for cut in tensor.cuts)):
        named = [row.key for row in rows if row.key != OWN]
        key = named[0] if named else tensor.keys[0]
        box = tuple(run for row in rows for run in row.box)
        if key in wanted and _is_chosen(box, choice):
            found.append((key, box, _place(tensor, rows, dims[0])))
    flat = any(dims[0] in cut.dims and len(cut.dims) > 1 for cut in tensor.cuts)
    first = min((box[dims[0]][0] for _, box, _ in found), default=0)
    boxes = set()
    for key, box, loc in found:
        shown = tuple(box[dim] for dim in dims)
        if (key, shown) not in boxes:
            boxes.add((key, shown))
            start = shown[0][0] - first if flat else loc
            yield Segment(key=key, box=shown, start=offset + start)


def _place(tensor: LocalTensor, rows: Sequence[Row], dim: int) -> int:
    """Where rows begin along the local dim of a canonical one."""
    return next(row.loc for cut, row in zip(tensor.cuts, rows, strict=True) if dim in cut.dims)


def _is_chosen(box: Box, choice: Choice) -> bool:
    layers, experts, *_ = box
    in_layer = layers[0] <= choice.layer < layers[1]
    return in_layer and (choice.expert is None or experts[0] <= choice.expert < experts[1])


def _padding(cut: Cut, index: int, offset: int) -> Iterator[tuple[int, int]]:
    """Rows of padding."""
    strips, part = cut.strips, cut.index(index)
    for s in range(int(strips.start[part]), int(strips.start[part + 1])):
        if int(strips.key[s]) == PADDING:
            start = offset + int(strips.loc[s])
            yield start, start + int(strips.size[s])


def _copies(bars: Sequence[Bar], choice: Choice, dims: tuple[int, ...]) -> dict[str, int]:
    found = {}
    for c in choice.classes:
        boxes = [s.box for bar in bars for s in bar.segments if s.key == c.key]
        volume = prod(hi - lo for lo, hi in (c.domain[dim] for dim in dims))
        copies, rest = divmod(sum(prod(hi - lo for lo, hi in box) for box in boxes), volume)
        if not rest:
            found[c.key] = copies
    return found


def _bands_to(plan: Plan, rank: int, choice: Choice, dims: tuple[int, ...]) -> Iterator[Band]:
    """What a rank receives of it; of a tied tensor that it shows twice, once."""
    wanted = {c.key for c in choice.classes}
    for runs in plan.runs_to(rank):
        key = runs.flow.key
        if key not in wanted:
            continue
        wanted.remove(key)
        columns = (runs.src, runs.lo, runs.hi, runs.step)
        for src, lo, hi, step in zip(*(column.tolist() for column in columns), strict=True):
            box = tuple(zip(lo, hi, strict=True))
            if choice.layer in range(lo[0], hi[0], step) and _is_chosen(box, choice):
                shown = tuple(box[dim] for dim in dims)
                yield Band(src_rank=plan.src_ranks[src], dst_rank=rank, key=key, box=shown)
