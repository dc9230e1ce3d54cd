"""Why workers must stop, as the driver sees it: they raised, died or keep silent. Floor 4.

Called by `controller.watch`.

When one rank fails, its peers often fail too, because their connections break. Those errors are
echoes: the culprit is the first rank that raised or died on its own.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from shardloop.errors import WorkerDied, WorkerError
from shardloop.parallel.failure import Failure

STACK_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    error: Exception
    is_echo: bool
    at_s: float
    """`time.monotonic()` of the rank's report, or of the driver's notice."""


def culprit(faults: Sequence[Fault]) -> Fault:
    return min(faults, key=lambda fault: (fault.is_echo, fault.at_s))


def raised(failure: Failure, *, where: str) -> Fault:
    """One of our errors keeps its type and message and gets the remote traceback as a note."""
    if failure.error is None:
        error: Exception = WorkerError(f"{where}: {failure.summary}\n\n{failure.traceback}")
    else:
        error = failure.error
        error.add_note(f"{where}:\n{failure.traceback}")
    return Fault(error=error, is_echo=failure.is_echo, at_s=failure.at_s)


def died(process: BaseProcess, *, who: str, label: str | None) -> Fault:
    code = process.exitcode
    assert code is not None, "asked after its end"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    when = "while it was idle" if label is None else f"during {label}"
    return Fault(error=WorkerDied(f"{who} {how} {when}"), is_echo=False, at_s=time.monotonic())


def stack_of(process: BaseProcess, path: Path) -> str:
    """Where a busy worker is: the Python stacks that it dumps on a signal, last call first."""
    if process.pid is None or not process.is_alive():
        return "  (it has ended)"
    os.kill(process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACK_WAIT_S
    text = ""
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, text = text, path.read_text(encoding="utf-8") if path.exists() else ""
        if text and text == before:
            break
    return text.rstrip() or "  (it does not say)"
