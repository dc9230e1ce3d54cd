"""Reads the code without running it: its modules, what each imports, the floors. For tests."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@cache
def modules() -> dict[str, Path]:
    """Every module of the library by dotted name; a package's name is that of its `__init__`."""
    found = {}
    for path in sorted((ROOT / "shardloop").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, inside functions too.

    `from a import b` counts as `a` and as `a.b`; `torch.distributed` used through `import torch`
    counts too.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: write imports absolutely"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            dotted = f"{node.value.id}.{node.attr}"
            if dotted == "torch.distributed":
                found.add(dotted)
    return found


def imports_package(path: Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imports(path))


@cache
def floors() -> dict[int, tuple[str, ...]]:
    """Floor number -> the modules and packages that stand on it, from pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    names = [tuple(re.findall(r"[\w.]+", layer)) for layer in layers]
    return dict(zip(reversed(range(len(names))), names, strict=True))


def homes(module: str) -> list[int]:
    """Floors on which a module stands: itself or a package around it is listed there."""
    return [
        floor
        for floor, names in floors().items()
        if any(module == name or module.startswith(f"{name}.") for name in names)
    ]
