"""The grammar of layout strings, `scheme:axis=size,...`. Floor 1.

Called by `layout.schemes`, `parallel.mesh` and `controller.setup`.
"""

from dataclasses import dataclass

from shardloop.errors import LayoutError

AXES = {"hf": ("dp", "fsdp", "tp"), "engine": ("replicas", "tp")}
"""Schemes and their axes. hf: dp replicates, fsdp chunks dim 0, tp cuts by meaning. engine: fused
tensors cut by tp, the whole repeated `replicas` times."""
KINDS = {"hf": "a training", "engine": "an engine"}
"""What a layout of each scheme is called in messages."""
DEFAULT_SCHEME = "hf"


@dataclass(frozen=True, slots=True)
class LayoutSpec:
    """A layout string taken apart; `str()` gives the shortest string that means the same."""

    scheme: str
    axes: tuple[tuple[str, int], ...]
    """(name, size), outermost first."""

    def __str__(self) -> str:
        text = ",".join(f"{name}={size}" for name, size in self.axes)
        return text if self.scheme == DEFAULT_SCHEME else f"{self.scheme}:{text}"

    def size(self, axis: str) -> int:
        """Size of an axis, 1 where the string does not name it."""
        return dict(self.axes).get(axis, 1)


def parse_layout(spec: str) -> LayoutSpec:
    """Read a layout string such as `fsdp=2,tp=2` or `engine:tp=4`, outermost axis first.

    Raises:
        LayoutError: unknown scheme or axis, an axis named twice, a size that is not 1 or more.
    """
    scheme, colon, body = spec.rpartition(":")
    scheme = scheme.strip() if colon else DEFAULT_SCHEME
    if scheme not in AXES:
        raise LayoutError(
            f"layout {spec!r}: unknown scheme {scheme!r}; choose from {', '.join(AXES)}"
        )
    axes = tuple(_parse_axis(spec, scheme, item) for item in body.split(","))
    names = [name for name, _ in axes]
    for name in names:
        if names.count(name) > 1:
            raise LayoutError(f"layout {spec!r}: axis {name!r} is named twice; name each axis once")
    return LayoutSpec(scheme, axes)


def _parse_axis(spec: str, scheme: str, item: str) -> tuple[str, int]:
    name, equals, size = (text.strip() for text in item.partition("="))
    allowed = ", ".join(AXES[scheme])
    if not equals:
        raise LayoutError(
            f"layout {spec!r}: {item!r} is not axis=size; write for example "
            f"{AXES[scheme][-1]}=2, with axes of {scheme} from {allowed}"
        )
    if name not in AXES[scheme]:
        raise LayoutError(
            f"layout {spec!r}: {KINDS[scheme]} layout has no axis {name!r}; choose from {allowed}"
        )
    if not (size.isascii() and size.isdigit()) or int(size) < 1:
        raise LayoutError(f"layout {spec!r}: {name}={size}; choose a whole number >= 1")
    return name, int(size)
