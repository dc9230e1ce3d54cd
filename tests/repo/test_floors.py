"""The house stands: every module has one floor, and heavy imports stay where they belong.

That no module imports from a higher floor is checked by import-linter (`make check`), which reads
the same list of floors in pyproject.toml.
"""

import subprocess
import sys

import pytest

from tests.repo.source import ROOT, homes, imports, imports_package, modules

# `shardloop` is the root and names nothing; a package that spreads over floors imports nothing.
ROOMLESS = {"shardloop", "shardloop.engines"}
WITHOUT_TORCH = (
    "shardloop.layout",
    "shardloop.families",
    "shardloop.reshard.plan",
    "shardloop.reshard.verify",
    "shardloop.reshard.cost",
)
HEAVY = ("torch", "transformers", "ray", "matplotlib", "numpy")


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def importers(package: str) -> set[str]:
    return {name for name, path in modules().items() if imports_package(path, package)}


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in sys.modules after `statement` in a fresh interpreter."""
    program = f"import sys; {statement}; print(*sorted({{n.split('.')[0] for n in sys.modules}}))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return set(done.stdout.split())


def test_every_module_stands_on_exactly_one_floor() -> None:
    misplaced = {
        name: homes(name) for name in modules() if name not in ROOMLESS and len(homes(name)) != 1
    }
    assert not misplaced, "list these in pyproject.toml, tool.importlinter"


def test_packages_that_spread_over_floors_import_nothing() -> None:
    for name in ROOMLESS & set(modules()):
        assert not imports(modules()[name]), f"{name}/__init__.py imports something"


def test_docstring_of_every_module_names_its_floor() -> None:
    wrong = {}
    for name, path in modules().items():
        if name in ROOMLESS or path.name == "__init__.py":
            continue
        head = path.read_text(encoding="utf-8").split('"""')[1]
        if f"Floor {homes(name)[0]}" not in head:
            wrong[name] = homes(name)[0]
    assert not wrong, "the module docstring says on which floor it stands"


def test_only_the_floor_of_processes_imports_torch_distributed() -> None:
    assert {name for name in importers("torch.distributed") if homes(name) != [3]} == set()


def test_only_the_controller_may_import_ray() -> None:
    assert {name for name in importers("ray") if homes(name) != [4]} == set()


def test_transformers_stays_behind_one_package() -> None:
    assert all(within(name, ("shardloop.hf",)) for name in importers("transformers"))


def test_words_and_planning_import_no_torch() -> None:
    light = {name for name in modules() if homes(name) == [0] or within(name, WITHOUT_TORCH)}
    assert light & importers("torch") == set()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import shardloop").isdisjoint(HEAVY)


@pytest.mark.parametrize("module", ["types", "errors", "config", "metrics", "intervals", "presets"])
def test_words_load_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import shardloop.{module}").isdisjoint(HEAVY)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_planning_needs_no_torch_at_run_time(module: str) -> None:
    assert loaded_by(f"import {module}").isdisjoint({"torch", "transformers", "ray"})
