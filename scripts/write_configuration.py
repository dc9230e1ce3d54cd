"""Writes docs/configuration.md from shardloop/config and the presets. Run by `make docs`.

The text of a field is the docstring under it, so the page cannot say anything else than the code.
"""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shardloop import config
from shardloop.presets import PRESETS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
INTRO = """\
# Configuration

<!-- Written by `make docs` from shardloop/config; change the docstrings there. -->

Every setting of `shardloop train` is a field of a frozen dataclass in `shardloop/config`,
checked when it is made. A flag changes one field of the preset that the run starts from.
`shardloop train --check` prints the resolved plan and stops before anything runs.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    flag: str
    default: Any
    values: tuple[str, ...]
    """What may be chosen; none where that is no list."""
    text: str


def field_docstrings(cls: type) -> dict[str, str]:
    """Field name -> the docstring under it, on one line."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in pairwise(definition.body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(words))),
            ):
                found[name] = " ".join(words.split())
    return found


def values(hint: Any) -> tuple[str, ...]:
    """What a field of such a type may be, where that is a list of values."""
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    return tuple(value for part in get_args(hint) for value in values(part))


def class_docstring(cls: type) -> str:
    """Its docstring on one line; empty for the signature that dataclasses put in its place."""
    text = " ".join((cls.__doc__ or "").split())
    return "" if text.startswith(f"{cls.__name__}(") else text


def sections(value: Any, prefix: str = "") -> Iterator[tuple[str, str, list[Setting]]]:
    """(prefix, docstring, settings) of a config and of each config inside it, outermost first."""
    texts, hints = field_docstrings(type(value)), get_type_hints(type(value))
    nested, settings = [], []
    for field in fields(value):
        entry = getattr(value, field.name)
        flag = prefix + field.name.replace("_", "-")
        if is_dataclass(entry):
            nested.append((entry, f"{flag}."))
        else:
            settings.append(
                Setting(
                    flag=flag,
                    default=entry,
                    values=values(hints[field.name]),
                    text=texts.get(field.name, ""),
                )
            )
    yield prefix.rstrip("."), class_docstring(type(value)), settings
    for entry, inner in nested:
        yield from sections(entry, inner)


def flat(value: Any) -> dict[str, Any]:
    return {s.flag: s.default for _, _, settings in sections(value) for s in settings}


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def preset_table() -> str:
    """The settings in which any preset differs from the defaults."""
    defaults = flat(config.TrainConfig())
    columns = {name: flat(preset) for name, preset in PRESETS.items()}
    changed = [
        flag
        for flag in defaults
        if any(column[flag] != defaults[flag] for column in columns.values())
    ]
    rows = [
        [
            f"`--{flag}`",
            f"`{defaults[flag]}`",
            *(f"`{column[flag]}`" for column in columns.values()),
        ]
        for flag in changed
    ]
    return table(["flag", "default", *(f"`{name}`" for name in columns)], rows)


def meaning(setting: Setting) -> str:
    """Its text, and every value that it may have."""
    if not setting.values:
        return setting.text
    return f"{setting.text} One of {', '.join(f'`{value}`' for value in setting.values)}."


def page() -> str:
    text = INTRO
    for prefix, about, settings in sections(config.TrainConfig()):
        text += f"\n## {prefix or 'The run'}\n\n"
        text += f"{about}\n\n" if prefix and about else ""
        rows = [[f"`--{s.flag}`", f"`{s.default}`", meaning(s)] for s in settings]
        text += table(["flag", "default", "meaning"], rows)
    return f"{text}\n## What the presets change\n\n{preset_table()}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(Path.cwd())}" if PAGE.is_relative_to(Path.cwd()) else PAGE)
