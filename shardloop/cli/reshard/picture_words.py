"""What a picture says of its bars. Called by `cli.reshard.picture`. Floor 5."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardloop.cli.reshard.tensor_map import Bar, Segment, TensorMap
from shardloop.families.base import CanonicalModel

DIMS = {2: "rows", 3: "columns"}
"""What the dims of a matrix are called."""


@dataclass(frozen=True)
class Words:
    """Labels of a map's segments, and the notes below it."""

    shown: TensorMap
    model: CanonicalModel

    def labelled(self, bar: Bar) -> list[list[Segment]]:
        """Segments that share a label: of experts those side by side, else each by itself."""
        groups: dict[tuple[object, ...], list[Segment]] = {}
        for segment in bar.segments:
            alone = "" if self.shown.of_experts else segment.key
            groups.setdefault((alone, segment.start, segment.box), []).append(segment)
        return list(groups.values())

    def of(self, segments: Sequence[Segment]) -> str:
        """Such as `q 0:512 · heads 0–3` or `experts 0–7 · gate, up rows 0:384`."""
        return self._of_experts(segments) if self.shown.of_experts else self._of_rows(segments[0])

    def _of_rows(self, segment: Segment) -> str:
        (lo, hi), *rest = segment.box
        c = next(c for c in self.shown.classes if c.key == segment.key)
        words = [f"{class_word(segment.key)} {lo}:{hi}"]
        unit = c.dims[0].size // self.model.units.get(c.dims[0].meaning, c.dims[0].size)
        if unit > 1 and lo % unit == 0 and hi % unit == 0:
            words.append(numbered("head", lo // unit, hi // unit))
        if rest and rest[0] != (0, c.dims[1].size):
            words.append(f"columns {rest[0][0]}:{rest[0][1]}")
        return " · ".join(words)

    def _of_experts(self, segments: Sequence[Segment]) -> str:
        (lo, hi), (first, end) = segments[0].box
        words = [numbered("expert", lo, hi)]
        if (first, end) != self.shown.classes[0].domain[self.shown.dims[1]]:
            names = ", ".join(class_word(segment.key) for segment in segments)
            words.append(f"{names} {DIMS[self.shown.dims[1]]} {first}:{end}")
        return " · ".join(words)

    def shapes(self) -> str:
        """The tensors, and how to read height and width."""
        shapes = ", ".join(
            f"{class_word(c.key)} {' × '.join(map(str, c.shape))}" for c in self.shown.classes
        )
        if len(self.shown.dims) == 1:
            return f"{shapes}; a bar's height is elements"
        if not self.shown.of_experts:
            return f"{shapes}; a bar's height is its rows, its width columns"
        low, high = self.shown.classes[0].experts
        across = DIMS[self.shown.dims[1]]
        return f"{high - low} experts: {shapes}; a bar's height is experts, its width {across}"

    def notes(self) -> Iterator[str]:
        """What needs said besides."""
        shown = self.shown
        if any(band.src_rank == band.dst_rank for band in shown.bands):
            yield "dark bands stay on their rank"
        for copies in sorted(set(shown.copies.values()) - {1}):
            keys = [class_word(key) for key, number in shown.copies.items() if number == copies]
            yield f"{', '.join(keys)}: every element on {copies} destination ranks"
        for dim in shown.hidden:
            yield f"{DIMS[dim]} are cut too, which is not shown"
        sides = (("source", shown.src, shown.num_src), ("destination", shown.dst, shown.num_dst))
        for side, bars, count in sides:
            if len(bars) < count:
                yield f"{len(bars)} of {count} {side} ranks are shown"


def numbered(what: str, lo: int, hi: int) -> str:
    """`head 3`, or `heads 0–3` for 0:4."""
    return f"{what} {lo}" if hi == lo + 1 else f"{what}s {lo}–{hi - 1}"


def class_word(key: str) -> str:
    """`self_attn.q_proj.weight` -> `q`."""
    skipped = ("model", "self_attn", "mlp", "weight", "experts", "{expert}")
    parts = [part for part in key.split(".") if part not in skipped]
    return " ".join(part.removesuffix("_proj") for part in parts) or key
