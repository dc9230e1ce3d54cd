"""The door answers without opening the house: version, help and mistakes need no torch."""

import os
import subprocess
import sys
from typing import Any

import pytest

import shardloop
from tests.repo.source import ROOT

HEAVY = "torch transformers numpy"


def shardloop_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a fresh interpreter in which the heavy packages cannot be imported."""
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r}.split()));"
        "from shardloop.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_version_is_that_of_the_package() -> None:
    done = shardloop_command("--version")
    assert (done.returncode, done.stdout) == (0, f"shardloop {shardloop.__version__}\n"), (
        done.stderr
    )


def test_help_lists_every_command() -> None:
    from shardloop.cli.main import COMMANDS

    done = shardloop_command("--help")
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


def test_no_command_is_a_usage_error() -> None:
    assert shardloop_command().returncode == 2


def test_unknown_command_is_refused_with_the_allowed_ones() -> None:
    done = shardloop_command("trian")
    assert done.returncode == 2
    assert "'trian'" in done.stderr and "train" in done.stderr


def test_module_and_command_are_the_same_door() -> None:
    command = [sys.executable, "-m", "shardloop", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == shardloop_command("--version").stdout


def test_a_reader_that_has_gone_ends_the_command_without_a_word() -> None:
    """As in `shardloop --help | head -1`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "shardloop", "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def shardloop_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardloop", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, **options)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no /dev/full")
def test_output_that_cannot_be_written_is_one_error() -> None:
    with open("/dev/full", "w") as full:
        done = shardloop_process("--help", stdout=full)
    assert done.returncode == 6
    assert done.stderr.startswith("error: cannot write to standard output: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_character_that_the_terminal_lacks_ends_nothing() -> None:
    program = "from shardloop.cli import main as m; m.USAGE = '1 × 2 – 3'; m.main(['--help'])"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 ? 2 ? 3\n", "")


def test_a_command_speaks_before_it_loads_anything() -> None:
    """Nothing heavy can be imported here: the word comes before the failure."""
    done = shardloop_command("eval", "--model", "tiny", "--task", "sort")
    assert done.stderr.startswith("loading torch ...\n")
    assert not shardloop_command("train", "--quiet").stderr.startswith("loading")
