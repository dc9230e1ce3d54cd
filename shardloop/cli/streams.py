"""Standard streams that are closed, full, or read by nobody. Called by the commands. Floor 5.

stdout closed   told on stderr before anything runs: what is asked for would be lost
stdout full     told on stderr, once a line cannot be written
stdout broken   silence, and the code of a program ended by SIGPIPE: `| head -1` wants no more
stderr, stdin   may be closed; what is told on a stderr that takes nothing is lost, and no more
"""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from shardloop.errors import CheckpointError

BROKEN_PIPE = 141
"""Exit code when the reader of our output has gone: what a shell gives a program ended by SIGPIPE.
"""


def with_streams(command: Callable[[], int]) -> int:
    """Runs `command`; what its output meets becomes a line on stderr and an exit code."""
    if sys.stdout is None:
        _fill_closed((0, 1, 2))
        tell("error: cannot write to standard output: it is closed; add >/dev/null or >FILE")
        return CheckpointError.exit_code
    _fill_closed((0, 2))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets a question mark instead of a failed run.
        sys.stdout.reconfigure(errors="replace")
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if not _give_up_failing():
            raise
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        tell(f"error: cannot write to standard output: {error}")
        return CheckpointError.exit_code


def tell(text: str, *, end: str = "\n") -> None:
    """On stderr; lost where stderr takes nothing."""
    with suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def _fill_closed(descriptors: tuple[int, ...]) -> None:
    """Closed ones of 0, 1 and 2, lowest first, lead nowhere: the next file opened would get their
    number, and what is printed in it."""
    for number in descriptors:
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  for good


def _give_up_failing() -> bool:
    """Turns away the stream that one more line cannot be printed to: Python would try at its exit,
    and complain. Was there one? If not, the error was the command's own."""
    for stream in (sys.stdout, sys.stderr):
        if _fails(stream):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            return True
    return False


def _fails(stream: TextIO) -> bool:
    try:
        print(file=stream, flush=True)
    except OSError:
        return True
    return False
