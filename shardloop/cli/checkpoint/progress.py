"""A line on standard error that tells how far a long command is. Floor 5.

Called by `shardloop checkpoint`.
"""

import sys

from shardloop.cli.streams import tell
from shardloop.reshard.cost import bytes_text

STEP = 0.1
"""Share of the bytes after which a new line is printed where lines cannot be written over."""


class ProgressLine:
    """Called with what is done, the bytes so far and in all."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._what = ""
        self._next = STEP
        self._has_line = False

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_line and self._is_terminal:
            tell("")

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self._what, self._next = what, STEP
        share = done / total if total else 1.0
        text = f"{what}: {bytes_text(done)} of {bytes_text(total)}"
        if self._is_terminal:
            tell(f"\r{text:60}", end="")
        elif share >= self._next:
            tell(text)
            self._next = share + STEP
        self._has_line = True
