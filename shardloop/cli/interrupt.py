"""Ctrl-C during a run: the first asks it to end after the present step, the second ends it at once.

Floor 5.
"""

import signal
import sys
from types import FrameType


class InterruptFlag:
    """Context manager that holds back SIGINT and SIGTERM; `is_set()` says whether one came."""

    def __init__(self) -> None:
        self._set = False
        self._previous: dict[int, object] = {}

    def is_set(self) -> bool:
        return self._set

    def __enter__(self) -> "InterruptFlag":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._set:
            raise KeyboardInterrupt
        self._set = True
        print("\nstopping after this step; once more stops at once", file=sys.stderr)
