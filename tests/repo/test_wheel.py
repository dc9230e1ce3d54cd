"""What a user installs: the wheel has the whole library, nothing else, and works elsewhere."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import shardloop
from tests.repo.source import ROOT

pytestmark = pytest.mark.slow


def run(*command: str, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), cwd=ROOT)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
    ]
    run(*pip, str(wheel))
    return target


def in_fresh_interpreter(installed: Path, cwd: Path, *arguments: str) -> str:
    """Python with nothing on its path but the installed wheel and this environment's packages.

    `-S` keeps out the `.pth` file through which an editable install would be found.
    """
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    env = {**os.environ, "PYTHONPATH": path}
    return run(sys.executable, "-S", *arguments, cwd=cwd, env=env)


def test_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    expected = {
        path.relative_to(ROOT).as_posix()
        for room in ("shardloop", "judge")
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == expected
    assert {"shardloop/py.typed", "judge/py.typed"} <= names


def test_wheel_carries_its_licence_and_command(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = f"shardloop-{shardloop.__version__}.dist-info"
    assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
    assert (
        "shardloop = shardloop.cli.main:main" in archive.read(f"{info}/entry_points.txt").decode()
    )


def test_installed_package_is_imported_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    program = "import shardloop; print(shardloop.__file__)"
    found = Path(in_fresh_interpreter(installed, tmp_path, "-c", program).strip())
    assert found.resolve() == (installed / "shardloop/__init__.py").resolve()


def test_installed_command_tells_its_version(installed: Path, tmp_path: Path) -> None:
    told = in_fresh_interpreter(installed, tmp_path, "-m", "shardloop", "--version")
    assert told == f"shardloop {shardloop.__version__}\n"


def test_every_module_of_the_wheel_imports(installed: Path, tmp_path: Path) -> None:
    program = (
        "import importlib, pkgutil, shardloop\n"
        "for module in pkgutil.walk_packages(shardloop.__path__, 'shardloop.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)\n"
        "        print(module.name)\n"
    )
    names = in_fresh_interpreter(installed, tmp_path, "-c", program).split()
    assert "shardloop.reshard.plan" in names and "shardloop.cli.main" in names
