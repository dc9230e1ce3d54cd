"""The map of one tensor as a picture: source ranks left, destination ranks right. Floor 5.

Called by `shardloop reshard plan --picture` and by `make docs`. A bar is what a rank holds: its
height is rows, its width columns, so a rank that holds half the columns fills half the width. A
band is one transfer. Of all experts of a layer, the height is experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardloop.cli.reshard.picture_words import Words
from shardloop.cli.reshard.tensor_map import Band, Bar, Segment, TensorMap
from shardloop.errors import UsageError
from shardloop.families.base import CanonicalModel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#3d6fb4", "#d9822b", "#3f9d72", "#9a5fb0", "#c2504d", "#5b7a8c")
"""Of the classes, in the order of the fused tensor."""
INK, SOFT, PAPER, GHOST = "#1f2933", "#52606d", "#fbfaf7", "#e8e4da"
STYLE: Any = {
    "font.family": ["DejaVu Sans"],
    "svg.hashsalt": "shardloop",
    "hatch.linewidth": 0.7,
}
"""With a fixed salt, the same map is the same file."""

WIDTH, BAR, REACH = 12.0, 1.15, 3.7
HEAD, FOOT = 1.4, 0.7
"""Inches: the picture, a bar and the way between the columns; what is above and below them."""
GAP, LINE = 0.30, 0.165
"""Inches between bars, where a rank's name stands; height of a line of small text."""


@dataclass(frozen=True)
class Column:
    """One side: where each bar begins, and inches per row."""

    bars: tuple[Bar, ...]
    left: float
    tops: tuple[float, ...]
    scale: float

    def y(self, index: int, row: float) -> float:
        return self.tops[index] + row * self.scale


def check_picture(path: Path) -> None:
    """
    Raises:
        UsageError: the name's end is none of `FORMATS`.
    """
    if path.suffix.lower() not in FORMATS:
        raise UsageError(
            f"picture={str(path)!r} ends in {path.suffix or 'nothing'}; choose from "
            f"{', '.join(FORMATS)}"
        )


def draw_map(shown: TensorMap, model: CanonicalModel, path: Path, *, title: str) -> None:
    """Write the picture, in the format that the path's end says.

    Raises:
        UsageError: there is no such format. OSError: the file cannot be written.
    """
    check_picture(path)
    # Loaded here: it takes a third of a second, and no other command needs it.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    height = max(_wanted_height(bars) for bars in (shown.src, shown.dst))
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, HEAD + height + FOOT), facecolor=PAPER, dpi=150)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_xlim(0, WIDTH)
        axes.set_ylim(height + FOOT, -HEAD)
        axes.axis("off")
        left = (WIDTH - REACH) / 2 - BAR
        src = _column(shown.src, left, height)
        dst = _column(shown.dst, left + BAR + REACH, height)
        words = Words(shown, model)
        _draw(axes, words, src, dst)
        _draw_words(axes, words, title, height)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, metadata=metadata)


def _wanted_height(bars: Sequence[Bar]) -> float:
    lines = sum(max(2, len(bar.segments) + len(bar.padding)) for bar in bars)
    return max(3.0, lines * LINE + GAP * (len(bars) - 1))


def _column(bars: tuple[Bar, ...], left: float, height: float) -> Column:
    rows = sum(bar.length for bar in bars)
    gap = GAP if len(bars) > 1 else 0.0
    scale = (height - gap * (len(bars) - 1)) / rows
    tops, top = [], 0.0
    for bar in bars:
        tops.append(top)
        top += bar.length * scale + gap
    return Column(bars, left, tuple(tops), scale)


def _draw(axes: "Axes", words: Words, src: Column, dst: Column) -> None:
    shown = words.shown
    colour_of = {c.key: COLOURS[i % len(COLOURS)] for i, c in enumerate(shown.classes)}
    for band in shown.bands:
        _draw_band(axes, band, src, dst, shown, colour_of[band.key])
    for column, side in ((src, -1), (dst, 1)):
        for index, bar in enumerate(column.bars):
            _draw_bar(axes, column, index, bar, shown, colour_of)
        _draw_labels(axes, column, side, colour_of, words)


def _draw_band(
    axes: "Axes", band: Band, src: Column, dst: Column, shown: TensorMap, colour: str
) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    start, end = _place(src, band.src_rank, band, shown), _place(dst, band.dst_rank, band, shown)
    a, b = src.left + BAR, dst.left
    middle = (a + b) / 2
    points = [
        (a, start[0]),
        (middle, start[0]),
        (middle, end[0]),
        (b, end[0]),
        (b, end[1]),
        (middle, end[1]),
        (middle, start[1]),
        (a, start[1]),
        (a, start[0]),
    ]
    codes = [
        Outline.MOVETO,
        *[Outline.CURVE4] * 3,
        Outline.LINETO,
        *[Outline.CURVE4] * 3,
        Outline.CLOSEPOLY,
    ]
    patch = PathPatch(Outline(points, codes), facecolor=colour, edgecolor=colour)
    patch.set(alpha=0.6 if band.src_rank == band.dst_rank else 0.3, linewidth=0.4)
    axes.add_patch(patch)


def _place(column: Column, rank: int, band: Band, shown: TensorMap) -> tuple[float, float]:
    """Top and bottom of a band at the bar of a rank.

    Where it has a part of what the rank holds across, it takes that part of the height: bands of
    one bar lie beside each other, and each is as high as what it moves.
    """
    index = next(i for i, bar in enumerate(column.bars) if bar.rank == rank)
    segments = column.bars[index].segments
    inside = next(s for s in segments if s.key == band.key and _holds(s, band))
    beside = [_across(s, shown) for s in segments if s.start == inside.start]
    lo, hi = band.box[0]
    first, last = (inside.start - inside.box[0][0] + end for end in (lo, hi))
    left, right = _across(band, shown)
    before = sum(max(0.0, min(b, left) - a) for a, b in beside)
    total = sum(b - a for a, b in beside)
    top = first + (last - first) * before / total
    return column.y(index, top), column.y(index, top + (last - first) * (right - left) / total)


def _holds(segment: Segment, band: Band) -> bool:
    pairs = zip(segment.box, band.box, strict=True)
    return all(a <= lo and hi <= b for (a, b), (lo, hi) in pairs)


def _draw_bar(
    axes: "Axes",
    column: Column,
    index: int,
    bar: Bar,
    shown: TensorMap,
    colour_of: dict[str, str],
) -> None:
    from matplotlib.patches import Rectangle

    def box(lo: float, hi: float, across: tuple[float, float], **look: Any) -> None:
        corner = (column.left + across[0] * BAR, column.y(index, lo))
        size = ((across[1] - across[0]) * BAR, (hi - lo) * column.scale)
        axes.add_patch(Rectangle(corner, *size, **look))

    box(0, bar.length, (0, 1), facecolor=GHOST, edgecolor="none")
    for segment in bar.segments:
        look: dict[str, Any] = {"facecolor": colour_of[segment.key], "edgecolor": PAPER}
        box(segment.start, segment.start + segment.size, _across(segment, shown), lw=0.8, **look)
    for lo, hi in bar.padding:
        box(lo, hi, (0, 1), facecolor=PAPER, edgecolor=SOFT, hatch="////", lw=0.6)


def _across(segment: Segment | Band, shown: TensorMap) -> tuple[float, float]:
    """First and last place in a bar's width, as shares of it."""
    if len(segment.box) == 1:
        return 0.0, 1.0
    keys = [c.key for c in shown.classes]
    c = shown.classes[keys.index(segment.key)]
    parts = len(keys) if shown.of_experts else 1
    first = keys.index(segment.key) if shown.of_experts else 0
    (_, size), (lo, hi) = c.domain[shown.dims[1]], segment.box[1]
    return (first + lo / size) / parts, (first + hi / size) / parts


def _draw_labels(
    axes: "Axes", column: Column, side: int, colour_of: dict[str, str], words: Words
) -> None:
    edge = column.left if side < 0 else column.left + BAR
    align = "right" if side < 0 else "left"
    wanted, looks = [], []
    for index, bar in enumerate(column.bars):
        top = column.tops[index] - 0.05
        text = axes.text(column.left + BAR / 2, top, f"rank {bar.rank}", ha="center", va="bottom")
        text.set(color=INK, fontsize=9, fontweight="bold")
        for segments in words.labelled(bar):
            wanted.append(column.y(index, segments[0].start + segments[0].size / 2))
            looks.append((words.of(segments), colour_of[segments[0].key]))
        for lo, hi in bar.padding:
            wanted.append(column.y(index, (lo + hi) / 2))
            looks.append((f"padding, {hi - lo} rows", SOFT))
    placed = spread(wanted, LINE)
    for y, at, (label, colour) in zip(wanted, placed, looks, strict=True):
        axes.plot((edge, edge + side * 0.1, edge + side * 0.2), (y, at, at), color=colour, lw=0.7)
        axes.text(edge + side * 0.25, at, label, ha=align, va="center", fontsize=8, color=INK)


CENTRED: dict[str, Any] = {"ha": "center", "va": "center"}


def spread(wanted: Sequence[float], least: float) -> list[float]:
    """The same places moved apart to at least `least`, as little as their order allows.

    Places that are too close become a group around their mean, and groups that meet are merged.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[tuple[float, list[int]]] = []
    for i in order:
        mean, members = wanted[i], [i]
        while groups and mean - (len(members) - 1) * least / 2 < (
            groups[-1][0] + (len(groups[-1][1]) - 1) * least / 2 + least
        ):
            before, earlier = groups.pop()
            total = before * len(earlier) + mean * len(members)
            members = earlier + members
            mean = total / len(members)
        groups.append((mean, members))
    placed = [0.0] * len(wanted)
    for mean, members in groups:
        for number, i in enumerate(members):
            placed[i] = mean + (number - (len(members) - 1) / 2) * least
    return placed


def _draw_words(axes: "Axes", words: Words, title: str, height: float) -> None:
    name = axes.text(0.35, -HEAD + 0.3, words.shown.name, fontsize=13, color=INK, va="center")
    name.set_fontweight("bold")
    axes.text(0.35, -HEAD + 0.57, title, fontsize=9.5, color=SOFT, va="center")
    left = (WIDTH - REACH) / 2 - BAR
    for x, side in ((left, "source"), (left + BAR + REACH, "destination")):
        axes.text(x + BAR / 2, -0.4, side, fontsize=9.5, color=SOFT, **CENTRED)
    for line, told in enumerate((words.shapes(), " · ".join(words.notes()))):
        at = height + 0.3 + line * LINE
        axes.text(0.35, at, told, fontsize=8, color=SOFT, va="center")
