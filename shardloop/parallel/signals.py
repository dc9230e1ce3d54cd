"""The signals that ask a program to end, and what they must not cut in two. Floor 3.

Called by `parallel.worker`, `controller.launch` and `cli.interrupt`. Ctrl-C, `docker stop`, a batch
system and a closed terminal signal every process of a group. The driver alone decides what that
means: the others leave when their pipe to it ends.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def ignore_ending() -> None:
    """This process lives on through them from now on, and so do its children."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


@contextmanager
def children_spared() -> Iterator[None]:
    """Programs started in the block by this thread have them blocked from their first moment."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def postponed() -> Iterator[None]:
    """Those that come within the block take effect at its end.

    Outside the main thread there is nothing to do: Python runs no handlers there.
    """
    came: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    is_main = threading.current_thread() is threading.main_thread()
    try:
        for number in ENDING if is_main else ():
            handler = signal.getsignal(number)
            if handler is not None:  # one that Python did not install cannot be put back
                before[number] = handler
                signal.signal(number, signal.SIG_IGN if handler == signal.SIG_IGN else note)
        yield
    finally:
        for held, handler in before.items():
            signal.signal(held, handler)
        for held in dict.fromkeys(came):
            signal.raise_signal(held)
