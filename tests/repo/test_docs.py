"""The pages speak of what exists: every path, command, flag, code and number in them is checked."""

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import shardloop
from scripts.write_configuration import PAGE, page
from shardloop import errors
from shardloop.cli.main import COMMANDS, main
from shardloop.config import TrainConfig
from shardloop.presets import PRESETS
from tests.repo.source import ROOT, floors

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
README = ROOT / "README.md"
ROOMS = ("shardloop", "judge", "examples", "tests", "docs", "scripts", "benchmarks", ".ci")


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def fences(path: Path, *languages: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text_of(path), flags=re.MULTILINE | re.DOTALL)
    return [body for language, body in blocks if language in languages]


def inline_codes(path: Path) -> list[str]:
    plain = re.sub(r"^```.*?^```", "", text_of(path), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", plain)


def commands(path: Path) -> list[str]:
    """Shell lines of a page, in fences and in running text, without prompts and comments."""
    lines = [line for block in fences(path, "bash", "sh", "console") for line in block.splitlines()]
    cleaned = [re.sub(r"\s+#.*", "", line.removeprefix("$ ")).strip() for line in lines]
    return [line for line in [*cleaned, *inline_codes(path)] if line]


def words_after(path: Path, program: str) -> list[list[str]]:
    """The arguments of each call of `program` on a page."""
    pattern = rf"(?:^|[\s/])(?:{program})\s+(\S.*)"
    found = [re.search(pattern, command) for command in commands(path)]
    return [match[1].split() for match in found if match]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_path_exists(path: Path) -> None:
    named = [code for code in inline_codes(path) if code.split("/")[0] in ROOMS and "/" in code]
    linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text_of(path))
    places = [(ROOT, name) for name in named] + [(path.parent, link) for link in linked]
    lost = [name for folder, name in places if not any(folder.glob(name.rstrip("/")))]
    assert not lost


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_make_target_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", text_of(ROOT / "Makefile"), flags=re.MULTILINE))
    called = {w for ws in words_after(path, "make") for w in ws if "=" not in w and w[0] != "-"}
    assert called <= targets


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_shardloop_command_and_flag_exists(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in words_after(path, "shardloop"):
        if words[0] in ("--version", "--help", "COMMAND"):
            continue
        assert words[0] in COMMANDS, words
        flags = {word.split("=")[0] for word in words[1:] if word.startswith("--")}
        assert not flags - flags_of(words[0], capsys), words


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_flag_in_running_text_exists(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = {code.split()[0] for code in inline_codes(path) if code.startswith("--")}
    if told:
        assert told <= {flag for command in COMMANDS for flag in flags_of(command, capsys)}


def flags_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return set(re.findall(r"--[\w.-]*\w", capsys.readouterr().out))


def test_the_program_of_the_readme_prints_what_the_readme_says() -> None:
    (program,) = fences(README, "python")
    (expected, *_) = fences(README, "text")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip() == expected.rstrip()
    assert len(program.strip().splitlines()) <= 12


def tree_rows() -> list[str]:
    """Paths that the tree of the README shows, one a line, indented by two spaces a level."""
    block = next(body for body in fences(README, "") if body.startswith("shardloop/"))
    rows: list[str] = []
    parents: list[str] = []
    for line in block.splitlines():
        level = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[:level], line.split()[0].rstrip("/")]
        rows.append("/".join(parents))
    return rows


def test_tree_of_the_readme_is_the_tree() -> None:
    rows = tree_rows()
    assert [row for row in rows if not (ROOT / row).exists()] == []
    rooms = [path for path in (ROOT / "shardloop").iterdir() if path.name not in IGNORED]
    shown = {row for row in rows if row.count("/") == 1 and row.startswith("shardloop/")}
    assert {path.relative_to(ROOT).as_posix() for path in rooms} == shown


IGNORED = {"__pycache__", "__init__.py", "__main__.py", "py.typed"}


def test_exit_codes_of_the_readme_are_those_of_the_errors() -> None:
    table = re.findall(r"^\| (\d+) \| ([^|]*) \|", text_of(README), flags=re.MULTILINE)
    told = {name: int(code) for code, names in table for name in re.findall(r"`(\w+)`", names)}
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    subclasses = [kind for kind in kinds if issubclass(kind, errors.ShardloopError)]
    real = {kind.__name__: kind.exit_code for kind in subclasses}
    del real["ShardloopError"]
    assert told == real


def test_presets_of_the_readme_exist() -> None:
    told = re.findall(r"^\| `(\w+)` \|", text_of(README), flags=re.MULTILINE)
    assert sorted(told) == sorted(PRESETS)


def test_newest_release_of_the_changelog_is_the_version() -> None:
    releases = re.findall(r"^## (\d+\.\d+\.\d+)", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert releases[0] == shardloop.__version__


def test_configuration_page_is_current() -> None:
    assert text_of(PAGE) == page(), "run `make docs`"


def values_of(config: type, prefix: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Flag and allowed values of each setting that is one of a few."""
    for name, hint in get_type_hints(config).items():
        flag = f"{prefix}{name.replace('_', '-')}"
        if is_dataclass(hint):
            yield from values_of(hint, f"{flag}.")
        for kind in (hint, *get_args(hint)):
            if get_origin(kind) is Literal:
                yield flag, get_args(kind)


def test_configuration_page_lists_every_value_that_may_be_chosen() -> None:
    settings, _ = text_of(PAGE).split("## What the presets change")
    lines = {line.split("`")[1]: line for line in settings.splitlines() if "| `--" in line}
    told = dict(values_of(TrainConfig))
    assert len(told) >= 18 and told["engine.sleep"] == ("never", "cache", "weights")
    for flag, values in told.items():
        wanted = ", ".join(f"`{value}`" for value in values)
        assert lines[f"--{flag}"].endswith(f" One of {wanted}. |"), flag


def test_configuration_page_names_real_flags(capsys: pytest.CaptureFixture[str]) -> None:
    told = set(re.findall(r"`(--[\w.-]+)`", text_of(PAGE)))
    assert told <= flags_of("train", capsys)


def test_floors_drawing_shows_every_module_on_its_floor() -> None:
    """A module is drawn when it, or a package around it, stands in the row of its floor."""
    (drawing,) = [body for body in fences(ROOT / "docs/architecture.md", "") if "5  doors" in body]
    drawn = {int(floor): row for floor, row in re.findall(r"^(\d)  (.*)$", drawing, re.MULTILINE)}
    assert sorted(drawn) == sorted(floors())
    for floor, names in floors().items():
        expected = {name.removeprefix("shardloop.").replace(".", "/") for name in names}
        told = {
            f"{room}/{part}" if room else part
            for room, parts, single in re.findall(r"(\w+)/\{([\w,]+)\}|([\w/]+)", drawn[floor])
            for part in (parts.split(",") if parts else [single])
        }
        assert expected - {"__main__"} <= told, f"floor {floor}"
