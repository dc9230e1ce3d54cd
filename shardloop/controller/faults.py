"""Why workers must stop, as the driver sees it: they raised, died or keep silent. Floor 4.

Called by `controller.watch`.

When one rank fails, its peers often fail too, because their connections break. Those errors are
echoes: the culprit is the first rank that raised or died on its own.
"""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from shardloop.controller.launch import LOST_EXIT_CODE
from shardloop.errors import WorkerDied, WorkerError
from shardloop.parallel.failure import Failure

STACK_WAIT_S = 1.0
STOPPED = "  (it is stopped, by SIGSTOP or a debugger)"
WAITING_FILES = (
    *("distributed_c10d.py", "_functional_collectives.py", "_fsdp_collectives.py"),
    "parallel/agree.py",
)
WAITING_FRAMES = 4
"""A rank whose newest frames are in these files waits for other ranks."""


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
    if code == LOST_EXIT_CODE:
        who, how = "the fork server, parent of all ranks,", "died (killed, or out of memory)"
    elif code < 0:
        how = f"was killed by {_signal_name(-code)}"
    else:
        how = f"exited with code {code}"
    when = "while it was idle" if label is None else f"during {label}"
    return Fault(error=WorkerDied(f"{who} {how} {when}"), is_echo=False, at_s=time.monotonic())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has none
        return f"signal {number}"


def blame(stacks: Mapping[int, str], *, name: Callable[[int], str]) -> str:
    """Which of the ranks that do not answer hold up the others, from where each is."""
    stopped = [rank for rank, stack in stacks.items() if stack == STOPPED]
    waiting = [rank for rank, stack in stacks.items() if waits_for_others(stack)]
    held_up = waiting if len(waiting) < len(stacks) else []
    guilty = stopped or [rank for rank in stacks if rank not in held_up]
    text = ", ".join(map(name, guilty)) + (", stopped by a signal" if stopped else "")
    if held_up:
        text += f" (held up by that: {', '.join(map(name, held_up))})"
    return text


def waits_for_others(stack: str) -> bool:
    """Whether the main thread of such a dump is inside a collective."""
    main = next((part for part in stack.split("\n\n") if " in worker_main" in part), "")
    frames = [line for line in main.splitlines() if line.lstrip().startswith("File ")]
    return any(file in frame for frame in frames[:WAITING_FRAMES] for file in WAITING_FILES)


def stack_of(process: BaseProcess, path: Path) -> str:
    """Where a busy worker is: the Python stacks that it dumps on a signal, last call first."""
    if process.pid is None or not process.is_alive():
        return "  (it has ended)"
    if _is_stopped(process.pid):
        return STOPPED
    os.kill(process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACK_WAIT_S
    text = ""
    while time.monotonic() < deadline:
        time.sleep(0.05)
        before, text = text, path.read_text(encoding="utf-8") if path.exists() else ""
        if text and text == before:
            break
    return text.rstrip() or "  (it does not say)"


def _is_stopped(pid: int) -> bool:
    """False where the system has no /proc to ask."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] in "Tt"
