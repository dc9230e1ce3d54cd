"""How the answers of several ranks become one value. Called by `controller.groups`. Floor 4."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Literal

from shardloop.errors import WorkerError

Collect = Literal["all", "first", "sum", "same"]


def _sum(values: Sequence[Any]) -> Any:
    return reduce(_add, values)


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, Mapping):
        if left.keys() != right.keys():
            raise WorkerError(
                f"cannot sum over ranks: keys {sorted(left)} and {sorted(right)} differ"
            )
        return {key: _add(left[key], right[key]) for key in left}
    return left + right


def _same(values: Sequence[Any]) -> Any:
    for place, value in enumerate(values):
        if not _equal(values[0], value):
            raise WorkerError(
                f"ranks must agree, but the first gave {_short(values[0])} and number {place} "
                f"gave {_short(value)}"
            )
    return values[0]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Mapping):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(
            _equal(a, b) for a, b in zip(left, right, strict=True)
        )
    if hasattr(left, "shape"):
        return bool(left.shape == right.shape and (left == right).all())
    return bool(left == right)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "…"


COLLECTORS: dict[Collect, Callable[[list[Any]], Any]] = {
    "all": list,
    "first": lambda values: values[0],
    "sum": _sum,
    "same": _same,
}
