"""A problem's folder, read and checked. Called by all doors of the judge.

practice/problems/121-grpo-loss/
    problem.toml  statement.md  hints.md  traps.md  starter.py  reference.py  generator.py
    submissions/accepted/*.py  submissions/wrong/<trap>.py
"""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

Level = Literal["easy", "medium", "hard"]
FOLDER: Final = re.compile(r"(\d+)-[a-z0-9]+(?:-[a-z0-9]+)*")
FILES: Final = (
    "statement.md",
    "hints.md",
    "traps.md",
    "starter.py",
    "reference.py",
    "generator.py",
)
HEADING: Final = re.compile(r"^## +(.+?) *$", re.MULTILINE)
STRICT: Final = ConfigDict(extra="forbid", strict=True)

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Error = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0)]
Word = Annotated[str, Field(min_length=1)]


class PackageError(Exception):
    """A problem's folder that is not as it must be; all faults are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of a submission on all cases together."""

    __pydantic_config__ = STRICT
    cpu_s: Positive = 10.0
    memory_mb: Count = 1024
    output_kb: Count = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """|got - expected| <= atol + rtol |expected|, in float64; both 0: exact."""

    __pydantic_config__ = STRICT
    why: Word
    """From what it was derived: the spread of honest answers, and the nearest trap."""
    rtol: Error = 0.0
    atol: Error = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    __pydantic_config__ = STRICT
    forbidden: list[Word] = field(default_factory=list)
    """Dotted names of what must not be called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    __pydantic_config__ = STRICT
    allowed: list[Word]
    """What of torch.distributed may be called."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Cases that give points together."""

    __pydantic_config__ = STRICT
    name: Word
    points: Annotated[int, Field(ge=0)]
    sample: bool = False
    """Its cases are the same each time, and are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What problem.toml says."""

    __pydantic_config__ = STRICT
    format: Literal[1]
    id: Count
    title: Word
    level: Level
    chapter: Word
    concepts: list[Word]
    entry: Word
    """The function that is asked for: `def name(parameters)`."""
    tolerance: Tolerance
    groups: Annotated[list[Group], Field(min_length=1)]
    limits: Limits = field(default_factory=Limits)
    rules: Rules = field(default_factory=Rules)
    communication: Communication | None = None
    """Of a distributed problem."""


@dataclass(frozen=True, slots=True)
class Problem:
    folder: Path
    facts: Facts

    @property
    def slug(self) -> str:
        return self.folder.name

    @property
    def max_points(self) -> int:
        return sum(group.points for group in self.facts.groups)

    @property
    def entry(self) -> str:
        """Name of the function."""
        return signature(self.facts.entry)[0]

    @property
    def parameters(self) -> tuple[str, ...]:
        return signature(self.facts.entry)[1]

    def text(self, file: str) -> str:
        return (self.folder / file).read_text(encoding="utf-8")

    def sections(self, file: Literal["traps.md", "hints.md"]) -> dict[str, str]:
        """The texts under the second-level headings, by heading."""
        parts = HEADING.split(self.text(file))[1:]
        return {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}

    def submissions(self, kind: Literal["accepted", "wrong"]) -> dict[str, Path]:
        """By their names without .py, sorted."""
        return {file.stem: file for file in sorted(self.folder.glob(f"submissions/{kind}/*.py"))}


def find_problems(folder: Path) -> dict[int, Path]:
    """The folders of problems in `folder`, by rising id.

    Raises:
        PackageError: there is no such folder, or it has no problem, or two of one id.
    """
    if not folder.is_dir():
        raise PackageError(f"{folder}: no such folder; name the one that has the problems")
    named = [(FOLDER.fullmatch(entry.name), entry) for entry in folder.iterdir() if entry.is_dir()]
    found = sorted((int(match[1]), entry) for match, entry in named if match)
    if not found:
        raise PackageError(f"{folder}: has no problem; their folders are named like 121-grpo-loss")
    twice = [number for number, count in Counter(n for n, _ in found).items() if count > 1]
    if twice:
        raise PackageError(f"{folder}: several problems have the id {', '.join(map(str, twice))}")
    return dict(found)


def load_problem(folder: Path) -> Problem:
    """
    Raises:
        PackageError: files are missing, or problem.toml is not as it must be; all faults.
    """
    faults = [f"no {name}" for name in FILES if not (folder / name).is_file()]
    problem: Problem | None = None
    try:
        table = tomllib.loads((folder / "problem.toml").read_text(encoding="utf-8"))
        problem = Problem(folder, TypeAdapter(Facts).validate_python(table))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        faults.append(f"problem.toml: {error}")
    except ValidationError as error:
        faults += [f"problem.toml: {_written(fault)}" for fault in error.errors()]
    else:
        faults += _own_faults(problem)
    if faults or problem is None:
        raise PackageError(f"{folder}: " + "; ".join(faults))
    return problem


def signature(entry: str) -> tuple[str, tuple[str, ...]]:
    """Name and parameters of `def name(parameters)`.

    Raises:
        ValueError: it is not of that form; parameters have no defaults, stars or annotations.
    """
    try:
        (function,) = ast.parse(f"{entry}: ...").body
        assert isinstance(function, ast.FunctionDef)
        names = tuple(argument.arg for argument in function.args.args)
        assert ast.unparse(function).startswith(f"def {function.name}({', '.join(names)}):")
    except (SyntaxError, ValueError, AssertionError) as error:
        raise ValueError(f"{entry!r} is not of the form `def name(first, second)`") from error
    return function.name, names


def _written(fault: Any) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where}: {fault['msg']}, it is {fault['input']!r}"


def _own_faults(problem: Problem) -> Iterator[str]:
    facts = problem.facts
    if not (match := FOLDER.fullmatch(problem.slug)) or int(match[1]) != facts.id:
        yield f"the folder must be named {facts.id}-some-words"
    try:
        signature(facts.entry)
    except ValueError as error:
        yield f"problem.toml: entry: {error}"
    names = [group.name for group in facts.groups]
    if len({*names}) != len(names):
        yield f"problem.toml: groups: two of one name among {', '.join(names)}"
    if not problem.max_points:
        yield "problem.toml: groups: no group gives points"
