"""`shardloop COMMAND`: finds the command, runs it, and turns errors into exit codes. Floor 5."""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import shardloop
from shardloop.cli.interrupt import stop_at_once
from shardloop.cli.streams import tell, with_streams
from shardloop.errors import ShardloopError

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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        The exit code: 0, or that of the error (see `shardloop.errors`).
    """
    return with_streams(lambda: _answer(list(sys.argv[1:] if argv is None else argv)))


def _answer(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"shardloop {shardloop.__version__}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        tell(f"error: no command {command!r}; choose from {', '.join(COMMANDS)}")
        return 2
    return _run(command, rest)


def _run(command: str, arguments: Sequence[str]) -> int:
    # Nothing here ever asks a hub: a folder is a folder, and no name is looked up elsewhere.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    is_light = command in WITHOUT_TORCH or sys.modules.get("torch") is not None
    if not is_light and not SILENT & set(arguments):
        tell("loading torch ...")
    try:
        with stop_at_once():
            run = importlib.import_module(f"shardloop.cli.{command}").run
            code: int = run(arguments)
            return code
    except ShardloopError as error:
        if os.environ.get("SHARDLOOP_TRACEBACK"):
            traceback.print_exc()
        tell(f"error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        tell("interrupted")
        return 130
