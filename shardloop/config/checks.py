"""How a setting is checked: its kind, its bounds, what it needs beside it. Floor 0.

Called by the dataclasses beside it when they are made.
"""

import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shardloop.errors import UsageError

MOST_COUNT = 10**9


def flag(prefix: str, field_name: str) -> str:
    return f"{prefix}.{field_name.replace('_', '-')}".removeprefix(".")


def require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise UsageError(f"{name}={value}; {allowed}")


def check_kinds(prefix: str, config: Any) -> None:
    """Every field has a value of its declared type: the command line sees to that, Python not."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(hint) is Literal:
            allowed = get_args(hint)
            text = f"choose {' or '.join(map(str, allowed))}"
            require(flag(prefix, name), repr(value), value in allowed, text)
            continue
        if get_origin(hint) is tuple:
            require(flag(prefix, name), repr(value), type(value) is tuple, "it must be a tuple")
            continue
        if type(None) in get_args(hint) and get_origin(get_args(hint)[0]) is Literal:
            allowed = (*get_args(get_args(hint)[0]), None)
            text = f"choose {' or '.join(map(str, allowed))}"
            require(flag(prefix, name), repr(value), value in allowed, text)
            continue
        kinds = get_args(hint) or (hint,)
        kinds += (int,) if float in kinds else ()
        ok = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        wanted = " or ".join(WORDS.get(kind, kind.__name__) for kind in get_args(hint) or (hint,))
        require(flag(prefix, name), repr(value), ok, f"it must be {wanted}")


WORDS: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    type(None): "left out",
}


def at_least(prefix: str, low: int, *, most: float | None = None, **values: float) -> None:
    """Whole numbers are at most `MOST_COUNT` unless `most` says otherwise; others are finite."""
    for field_name, value in values.items():
        bound = MOST_COUNT if most is None and isinstance(value, int) else most
        if bound is None:
            ok, allowed = low <= value < math.inf, f"choose a finite value of {low} or more"
        else:
            ok, allowed = low <= value <= bound, f"choose a value from {low} to {bound}"
        require(flag(prefix, field_name), value, ok, allowed)


def above_zero(prefix: str, **values: float) -> None:
    for field_name, value in values.items():
        ok = 0 < value < math.inf
        require(flag(prefix, field_name), value, ok, "choose a finite value above 0")


def only(name: str, value: object, ok: bool, beside: str) -> None:
    require(name, value, ok, f"it has an effect with {beside} only: leave one of them out")
