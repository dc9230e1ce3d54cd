"""The grammar of layout strings, `scheme:axis=size,...`. Floor 1.

Called by `layout.schemes`, `parallel.mesh` and `controller`.
"""

from dataclasses import dataclass
from difflib import get_close_matches

from shardloop.errors import LayoutError

AXES = {
    "hf": ("pp", "dp", "fsdp", "zero3", "tp", "ep", "etp"),
    "megatron": ("pp", "vpp", "dp", "tp", "ep", "etp"),
    "engine": ("replicas", "tp", "ep"),
}
"""Schemes and their axes:

    pp         stages of consecutive layers
    vpp        chunks of layers on each stage, taken in turn; has no ranks of its own
    dp         copies of everything; an engine's are `replicas`
    fsdp       rows of what tp leaves, as torch.chunk cuts them
    zero3      elements of what tp leaves, flattened, in chunks of ceil(n / zero3)
    tp         heads, width and vocabulary
    ep, etp    routed experts, and the width of each; see `layout.grid` for their ranks
"""
KINDS = {"hf": "a training", "megatron": "a Megatron", "engine": "an engine"}
"""What a layout of each scheme is called in messages."""
EXAMPLES = {"hf": "fsdp=2", "megatron": "megatron:tp=2", "engine": "engine:tp=2"}
DEFAULT_SCHEME = "hf"
WITHOUT_RANKS = ("vpp",)
MOST_RANKS = 2**16
"""A plan between two layouts of so many ranks takes seconds to minutes, and its table of bytes by
pair still fits."""
MOST_FLAT_RANKS = 2**14
"""With zero3 every rank begins and ends amid rows of every tensor: a plan grows with ranks times
kinds of tensors (DeepSeek-V3 on so many: some ten seconds and 2 GB)."""


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

    def names(self, axis: str) -> bool:
        """Does the string name it?"""
        return axis in dict(self.axes)


def parse_layout(spec: str) -> LayoutSpec:
    """Read a layout string such as `fsdp=2,tp=2` or `engine:tp=4`, outermost axis first.

    Raises:
        LayoutError: unknown scheme or axis, an axis named twice, a size that is not from 1 to
            `MOST_RANKS` (of zero3 `MOST_FLAT_RANKS`), axes that exclude each other. All faults are
            named.
    """
    scheme, colon, body = spec.rpartition(":")
    scheme = scheme.strip() if colon else DEFAULT_SCHEME
    if scheme not in AXES:
        raise LayoutError(
            f"layout {spec!r}: unknown scheme {scheme!r}{_hint(scheme, tuple(AXES))}; choose from "
            f"{', '.join(AXES)}"
        )
    items = [tuple(text.strip() for text in item.partition("=")) for item in body.split(",")]
    faults = [fault for item in items for fault in _item_faults(scheme, *item)]
    names = [name for name, *_ in items]
    faults += [
        f"axis {name!r} is named twice; name each axis once"
        for name in dict.fromkeys(names)
        if name in AXES[scheme] and names.count(name) > 1
    ]
    if {"fsdp", "zero3"} <= {*names}:
        faults.append("fsdp and zero3 both cut what tp leaves; choose one of them")
    if "vpp" in names and "pp" not in names:
        faults.append("vpp without pp; name the stages too, such as pp=2,vpp=2")
    if faults:
        raise LayoutError(f"layout {spec!r}: {'; '.join(faults)}")
    return LayoutSpec(scheme, tuple((name, int(size)) for name, _, size in items))


def _item_faults(scheme: str, name: str, equals: str, size: str) -> list[str]:
    allowed = ", ".join(AXES[scheme])
    if name in AXES:
        return [f"{name!r} is a scheme, which needs axes; {_example(name)}"]
    if not equals:
        hint = "" if name in AXES[scheme] else _hint(name, (*AXES[scheme], *AXES))
        return [f"{name!r} is not axis=size{hint}; {_example(scheme)}"]
    faults = []
    if name not in AXES[scheme]:
        faults.append(
            f"{KINDS[scheme]} layout has no axis {name!r}{_hint(name, AXES[scheme])}; choose from "
            f"{allowed}"
        )
    most = MOST_FLAT_RANKS if name == "zero3" else MOST_RANKS
    is_whole = size.isascii() and size.isdigit() and len(size) <= len(str(most))
    if not is_whole or not 1 <= int(size) <= most:
        faults.append(f"{name}={size}; choose a whole number from 1 to {most}")
    return faults


def _example(scheme: str) -> str:
    axes = ", ".join(AXES[scheme])
    return f"write for example {EXAMPLES[scheme]}, with axes of {scheme} from {axes}"


def _hint(name: str, allowed: tuple[str, ...]) -> str:
    close = get_close_matches(name, allowed, n=1)
    return f" (do you mean {close[0]}?)" if close else ""
