"""The door answers without opening the house: version, help and mistakes need no torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
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


PLAN = ("reshard", "plan", "--model", "Qwen3-0.6B", "--src", "fsdp=2", "--dst", "engine:tp=2")


def shell(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a shell that sends or closes its streams."""
    line = f'exec "{sys.executable}" -m shardloop "$@" {redirection}'
    command = ["bash", "-c", line, "bash", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [("--version",), (), ("reshard",), PLAN, ("eval", "--help")])
def test_a_closed_output_is_one_error_before_anything_runs(arguments: tuple[str, ...]) -> None:
    done = shell(">&-", *arguments)
    assert done.returncode == 6
    assert done.stderr == (
        "error: cannot write to standard output: it is closed; add >/dev/null or >FILE\n"
    )
    assert shell(">&- 2>&-", *arguments).returncode == 6


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "<&-", "<&- 2>&-"])
def test_errors_that_cannot_be_told_go_nowhere_and_keep_their_code(redirection: str) -> None:
    assert shell(redirection, *PLAN[:-1], "engine:tp=3").stdout == ""
    assert shell(redirection, *PLAN[:-1], "engine:tp=3").returncode == 2
    assert shell(redirection, "nope").returncode == 2
    done = shell(redirection, *PLAN, "--json", "-")
    assert done.returncode == 0
    assert json.loads(done.stdout)["format"] == "shardloop-reshard-plan"


@pytest.mark.parametrize("redirection", ["<&- 2>&-", "2>/dev/full"])
def test_a_file_is_written_where_nothing_can_be_told(tmp_path: Path, redirection: str) -> None:
    path = tmp_path / "plan.json"
    done = shell(redirection, *PLAN, "--json", str(path))
    assert done.returncode == 0 and "proved: plan" in done.stdout
    assert json.loads(path.read_text())["format"] == "shardloop-reshard-plan"


def test_a_broken_pipe_of_the_command_itself_is_no_silent_end() -> None:
    program = (
        "from shardloop.cli import main as m\n"
        "def broken(_): raise BrokenPipeError('a worker has gone')\n"
        "m._answer = broken; m.main([])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "a worker has gone" in done.stderr


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
