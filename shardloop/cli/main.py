"""`shardloop COMMAND`: finds the command, runs it, and turns errors into exit codes. Floor 5."""

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

import shardloop
from shardloop.cli.interrupt import stop_at_once
from shardloop.errors import CheckpointError, ShardloopError

COMMANDS = {
    "train": "improve a model by GRPO",
    "sft": "fine-tune a model on a task's worked solutions",
    "eval": "measure a model on a task's held-out prompts",
    "generate": "complete prompts with the tensor-parallel engine",
    "report": "summarise finished runs, over seeds",
    "reshard": "plan and prove the way from one layout to another",
    "checkpoint": "inspect, convert and verify checkpoints, of other programs too",
}
WITHOUT_TORCH = {"reshard"}
"""Commands that load nothing heavy."""

USAGE = (
    "usage: shardloop COMMAND [options]\n\n"
    + "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    + "\n\n`shardloop COMMAND --help` lists the options of one; `shardloop --version` the release."
)

SILENT = {"-q", "--quiet", "-h", "--help"}
"""Flags with which a command says nothing while it loads."""
BROKEN_PIPE = 141
"""Exit code when the reader of our output has gone: what a shell gives a program ended by SIGPIPE.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit code: 0, or that of the error (see `shardloop.errors`).
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets a question mark instead of a failed run.
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return _answer(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _give_up_output()
        return BROKEN_PIPE
    except OSError as error:
        if not _output_fails():
            raise
        _give_up_output()
        print(f"error: cannot write to standard output: {error}", file=sys.stderr)
        return CheckpointError.exit_code


def _output_fails() -> bool:
    """Whether one more line cannot be printed either: then the error was not the command's."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False


def _give_up_output() -> None:
    """Python would flush once more at its exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answer(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"shardloop {shardloop.__version__}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        print(f"error: no command {command!r}; choose from {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return _run(command, rest)


def _run(command: str, arguments: Sequence[str]) -> int:
    # Nothing here ever asks a hub: a folder is a folder, and no name is looked up elsewhere.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    is_light = command in WITHOUT_TORCH or sys.modules.get("torch") is not None
    if not is_light and not SILENT & set(arguments):
        print("loading torch ...", file=sys.stderr, flush=True)
    try:
        with stop_at_once():
            run = importlib.import_module(f"shardloop.cli.{command}").run
            code: int = run(arguments)
            return code
    except ShardloopError as error:
        if os.environ.get("SHARDLOOP_TRACEBACK"):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
