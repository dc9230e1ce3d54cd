"""Ctrl-C during a command: what SIGINT, SIGTERM and SIGHUP do. Called by the commands. Floor 5.

InterruptFlag    the first asks a run to end after the present step, the second ends it at once
stop_at_once     each of them ends the command as Ctrl-C does: nothing is worth a wait
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from shardloop.parallel.signals import ENDING

HANG_UP_S = 2.0
"""A closed terminal is told by the kernel and again by the shell: within this time, it is one."""

Handler = Callable[[int, FrameType | None], Any]


class InterruptFlag:
    """Context manager that holds back the signals; `is_set()` says whether one came."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._at_s = 0.0
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        self._exits = ExitStack()

    def is_set(self) -> bool:
        return self._first is not None

    def __enter__(self) -> "InterruptFlag":
        self._exits.enter_context(_handled(self._handle))
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        _leave_closed(self._terminals)
        if self._first is None:
            self._first, self._at_s = number, time.monotonic()
            _say("\nstopping after this step; once more stops at once\n")
        elif not self._is_same_hang_up(number):
            raise KeyboardInterrupt

    def _is_same_hang_up(self, number: int) -> bool:
        is_hang_up = number == self._first == signal.SIGHUP
        return is_hang_up and time.monotonic() - self._at_s < HANG_UP_S


@contextmanager
def stop_at_once() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt too, so that workers and folders are cleaned."""
    terminals = [fd for fd in (1, 2) if os.isatty(fd)]

    def stop(number: int, frame: FrameType | None) -> None:
        _leave_closed(terminals)
        raise KeyboardInterrupt

    with _handled(stop):
        yield


@contextmanager
def _handled(handler: Handler) -> Iterator[None]:
    """The signals go to `handler` within the block, but for a SIGHUP that `nohup` turned off."""
    before: dict[int, Any] = {}
    try:
        for number in ENDING:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, handler)
        yield
    finally:
        for held, previous in before.items():
            signal.signal(held, previous)


def _leave_closed(terminals: list[int]) -> None:
    """Output to a terminal that has gone away is dropped: it would be an error amid a step."""
    for fd in terminals:
        if not os.isatty(fd):
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)


def _say(text: str) -> None:
    """To stderr, past its buffer: the signal may have come amid a print."""
    with suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), text.encode())
