"""What the driver waits for: answers still to come, and ranks that fail instead. Floor 4.

Called by `controller.groups`.

    expect ──▶ Pending ──wait_for──▶ all blobs, or the error of the culprit
                  ▲
                  └─ pump: answers from the pipes, deaths from the operating system

Several ranks may fail at once, since a death breaks its peers' connections. After the first failure
the others get `SETTLE_S` to report theirs, and the error raised is that of the rank that failed on
its own. Whoever asked then ends the processes: nothing here does.
"""

import itertools
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from shardloop.controller.faults import Fault, blame, culprit, died, raised, stack_of
from shardloop.controller.launch import Processes
from shardloop.errors import WorkerTimeout
from shardloop.parallel.worker import STARTED, stack_file

SETTLE_S = 0.5
"""After the first failure, the time the others get to report theirs: echoes can be faster."""
LONGEST_WAIT_S = 3600.0
"""The operating system takes no more than some weeks for one wait; a longer one is repeated."""
DEATH_S = 3.0
"""Most time between the end of a rank's pipe and that of its process."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The answers of some ranks to one call, as pickle bytes."""

    call_id: int
    label: str
    ranks: tuple[int, ...]
    blobs: dict[int, bytes] = field(default_factory=dict)

    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.blobs]


class Watch:
    """Over the processes of one world; `name` says who a rank is."""

    def __init__(self, processes: Processes, *, name: Callable[[int], str]) -> None:
        self._processes, self._name = processes, name
        self._ids = itertools.count(STARTED)
        self._expected: dict[int, Expected] = {}
        self._faults: list[Fault] = []
        self._dead: set[int] = set()
        self.is_torn = False
        """An interrupt came amid a message: nothing after it can be read."""

    @property
    def is_idle(self) -> bool:
        """No answer is outstanding."""
        return not self._expected

    def expect(self, *, label: str, ranks: tuple[int, ...]) -> Expected:
        """To be told before the call is sent. The first call of a world is its start."""
        expected = Expected(call_id=next(self._ids), label=label, ranks=ranks)
        self._expected[expected.call_id] = expected
        return expected

    def wait_for(self, expected: Expected, *, timeout_s: float) -> None:
        """Until every rank has answered.

        Raises:
            ShardloopError, WorkerError: a rank raised. WorkerDied: a process went away, of this
                call or not. WorkerTimeout: ranks did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        while expected.missing() or self._faults:
            now = time.monotonic()
            if self._faults:
                deadline = min(deadline, self._faults[0].at_s + SETTLE_S)
            if self._faults and (now >= deadline or self._is_settled()):
                raise culprit(self._faults).error
            if now >= deadline:
                raise self._timeout(expected, timeout_s)
            self._pump(deadline - now)

    def _is_settled(self) -> bool:
        """A culprit is known, and no rank is still to answer."""
        is_known = any(not fault.is_echo for fault in self._faults)
        return is_known and not any(expected.missing() for expected in self._expected.values())

    def _timeout(self, expected: Expected, timeout_s: float) -> WorkerTimeout:
        folder = self._processes.folder
        stacks = {
            rank: stack_of(self._processes.by_rank[rank], stack_file(folder, rank))
            for rank in expected.missing()
        }
        texts = (f"\n\n{self._name(rank)} is in:\n{stack}" for rank, stack in stacks.items())
        return WorkerTimeout(
            f"{expected.label}: no answer within {timeout_s:g} s from "
            f"{blame(stacks, name=self._name)}; "
            f"raise workers.timeout-s if the work is that long{''.join(texts)}"
        )

    def _pump(self, timeout_s: float) -> None:
        """Take in whatever comes first within `timeout_s`: answers, or the end of a process."""
        living = {r: p for r, p in self._processes.by_rank.items() if r not in self._dead}
        sources: dict[Any, int] = {p.sentinel: rank for rank, p in living.items()}
        sources |= {self._processes.connections[rank]: rank for rank in living}
        for rank in {
            sources[ready] for ready in wait(list(sources), min(timeout_s, LONGEST_WAIT_S))
        }:
            has_ended = living[rank].exitcode is not None
            pipe_is_open = self._take_answers(rank)
            if not pipe_is_open:
                living[rank].join(DEATH_S)  # the pipe closes just before the process is gone
            if has_ended or not pipe_is_open:
                self._note_death(rank)

    def _take_answers(self, rank: int) -> bool:
        """Everything that this rank has sent; False when there will be no more."""
        connection = self._processes.connections[rank]
        try:
            while connection.poll():
                self._take(rank, *pickle.loads(connection.recv_bytes()))
        except (EOFError, OSError):
            return False
        except KeyboardInterrupt:
            self.is_torn = True
            raise
        return True

    def _take(self, rank: int, call_id: int, ok: bool, blob: bytes) -> None:
        expected = self._expected[call_id]
        expected.blobs[rank] = blob
        if not ok:
            where = f"{self._name(rank)} raised in {expected.label}"
            self._faults.append(raised(pickle.loads(blob), where=where))
        if not expected.missing():
            del self._expected[call_id]

    def _note_death(self, rank: int) -> None:
        labels = [e.label for e in self._expected.values() if rank in e.missing()]
        process, label = self._processes.by_rank[rank], labels[0] if labels else None
        self._dead.add(rank)
        self._faults.append(died(process, who=self._name(rank), label=label))
