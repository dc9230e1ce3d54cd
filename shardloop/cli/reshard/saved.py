"""A plan in a JSON file: made again from its request, and compared. Floor 5.

Called by `shardloop reshard verify FILE.json`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shardloop.cli.reshard.facts import FORMAT, VERSION, document
from shardloop.cli.reshard.request import ITEMSIZE, Planned, Request, make
from shardloop.errors import PlanError, UsageError

MEASURED = ("seconds",)
"""Parts of the document that another run of the same request need not repeat."""
MOST_LISTED = 20
"""Differences that are listed; of more, their number."""


def same_plan(path: Path) -> Planned:
    """Makes the plan of a file again.

    Raises:
        UsageError: it is no plan. PlanError: it is another than its request makes; what
            differs is listed.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(told, dict) or (told.get("format"), told.get("version")) != (FORMAT, VERSION):
        raise UsageError(f"{path}: no {FORMAT} of version {VERSION}; write one with plan --json")
    planned = make(request_from_json(told.get("request"), str(path)))
    true = document(planned)
    faults = list(differences(told, json.loads(json.dumps(true))))
    if faults:
        more = [f"and {len(faults) - MOST_LISTED} more"] if len(faults) > MOST_LISTED else []
        raise PlanError(
            f"{path} is not the plan of its request; write it again with plan --json:\n"
            + "\n".join(f"  {fault}" for fault in faults[:MOST_LISTED] + more)
        )
    return planned


def request_from_json(told: Any, where: str) -> Request:
    """The request in a plan's JSON.

    Raises:
        UsageError: it has not the fields of a request; every one that is missing, unknown or of
            another kind is named. Or as `Request`.
    """
    if not isinstance(told, dict):
        raise UsageError(f"{where}: request is no object; write the plan again with --json")
    faults = [f"{name} is missing" for name in KINDS if name not in told]
    faults += [f"{name} is unknown" for name in told if name not in KINDS]
    faults += [
        f"{name}={told[name]!r}; it must be {what}"
        for name, (fits, what) in KINDS.items()
        if name in told and not fits(told[name])
    ]
    if faults:
        raise UsageError(f"{where}: request: {'; '.join(faults)}")
    lists = {name: tuple(value) for name, value in told.items() if isinstance(value, list)}
    return Request(**{**told, **lists})


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_ranks(value: Any) -> bool:
    return isinstance(value, list) and all(type(rank) is int for rank in value)


def _is_whole_or_null(value: Any) -> bool:
    return value is None or type(value) is int


KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_text, "a text"),
    "config": (lambda value: isinstance(value, dict), "an object"),
    "src": (_is_text, "a layout"),
    "dst": (_is_text, "a layout"),
    "dtype": (lambda value: _is_text(value) and value in ITEMSIZE, f"one of {', '.join(ITEMSIZE)}"),
    "colocate": (_is_flag, "true or false"),
    "src_ranks": (lambda value: value is None or _are_ranks(value), "null or whole numbers"),
    "dst_ranks": (lambda value: value is None or _are_ranks(value), "null or whole numbers"),
    "lost": (_are_ranks, "whole numbers"),
    "lora": (_is_whole_or_null, "null or a whole number"),
    "fp8": (_is_flag, "true or false"),
    "gb_per_s": (lambda value: type(value) in (int, float), "a number"),
    "rank": (_is_whole_or_null, "null or a whole number"),
}
"""Fields of a request in JSON: what fits, in code and in words."""


def differences(told: Any, true: Any, place: str = "") -> Iterator[str]:
    """Every place where two documents differ, as a line; measured parts are not compared."""
    if isinstance(told, dict) and isinstance(true, Mapping):
        for key in {**true, **told}:
            if not place and key in MEASURED:
                continue
            here = f"{place}.{key}" if place else key
            if key not in told:
                yield f"{here} is missing"
            elif key not in true:
                yield f"{here} is not part of the plan"
            else:
                yield from differences(told[key], true[key], here)
    elif isinstance(told, list) and isinstance(true, list) and len(told) == len(true):
        for index, (one, other) in enumerate(zip(told, true, strict=True)):
            yield from differences(one, other, f"{place}[{index}]")
    elif type(told) is not type(true) or told != true:
        yield f"{place} is {_short(told)}, the plan has {_short(true)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
