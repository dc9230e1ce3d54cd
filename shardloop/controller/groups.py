"""Worker groups: the processes of this machine as objects with methods. Floor 4.

Called by runs, tests and notebooks.

    LocalWorkers ──spawn──▶ WorkerGroup ──submit──▶ Pending ──result──▶ one value per rank
         │
         ├─ one process per rank (`controller.launch`), which runs `parallel.worker`
         ├─ one torch.distributed world over all ranks, and one process group per role
         └─ commands and small answers as pickle bytes over one pipe per rank; never weights

The first failure ends all ranks: the others may sit in a collective that cannot finish, and a
process group is of no use after that. The error names the rank that failed on its own, not the
peers whose connections broke. Afterwards every call repeats that the workers are stopped, and why.
All calls come from one thread of the driver.
"""

import itertools
import pickle
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardloop.controller.collect import COLLECTORS, Collect
from shardloop.controller.faults import Fault, culprit, died, raised, stack_of
from shardloop.controller.launch import new_processes
from shardloop.errors import UsageError, WorkerError, WorkerTimeout
from shardloop.parallel.worker import STARTED, stack_file

SETTLE_S = 0.5
"""After the first failure, the time the others get to report theirs: echoes can be faster."""
STOP_S = 3.0
"""Time an idle rank gets to leave by itself."""
START_S = 120.0
"""Least time for a start: the first one waits for the fork server to import torch."""


@dataclass(kw_only=True)
class Pending:
    """The answer of a `submit`, still to come."""

    workers: "LocalWorkers"
    call_id: int
    label: str
    ranks: tuple[int, ...]
    collect: Callable[[list[Any]], Any]
    blobs: dict[int, bytes] = field(default_factory=dict)

    def missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self.blobs]

    def result(self) -> Any:
        """Wait for every rank and collect.

        Raises:
            ShardloopError: a rank raised it, as that type; a note holds the remote traceback.
            WorkerError: a rank raised anything else, or the workers had already stopped.
            WorkerDied: a process went away.
            WorkerTimeout: ranks did not answer in time.
        """
        self.workers._wait_for(self, timeout_s=self.workers.timeout_s)
        return self.collect([pickle.loads(self.blobs[rank]) for rank in self.ranks])


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """One object on each of some ranks, called together; `ranks` is the order of the results."""

    key: str
    ranks: tuple[int, ...]
    workers: "LocalWorkers"

    def call(self, method: str, *args: Any, collect: Collect = "all", **kwargs: Any) -> Any:
        """Call a method (or read an attribute) on every rank and wait. Errors as `Pending.result`.

        Args:
            collect: "all" gives a list by rank, "first" the value of the first rank, "sum" the sum
                over ranks (of numbers, tensors, or dicts of them), "same" one value after checking
                that all ranks gave an equal one.
        """
        return self.submit(method, *args, collect=collect, **kwargs).result()

    def submit(self, method: str, *args: Any, collect: Collect = "all", **kwargs: Any) -> Pending:
        """Send a call without waiting. Each rank carries out its calls in the order of sending."""
        answering = frozenset(self.ranks[:1] if collect == "first" else self.ranks)
        return self.workers._submit(
            "call",
            (self.key, method, args, kwargs, answering),
            label=f"{self.key}.{method}",
            ranks=self.ranks,
            collect=collect,
        )

    def alive(self) -> bool:
        return self.workers.alive()

    def stop(self) -> None:
        """Stop all workers, this group's and the others': they share one world."""
        self.workers.stop()


class LocalWorkers:
    """Processes of this machine, one per rank; a context manager that stops them."""

    def __init__(
        self,
        roles: Mapping[str, Sequence[int]],
        *,
        threads: int = 1,
        timeout_s: float = 300.0,
        device: str = "cpu",
    ) -> None:
        """
        Args:
            roles: global ranks of each role. Together they are 0..n-1; a rank may have several.
            threads: CPU threads of each rank.
            timeout_s: longest wait for a call.
            device: "cpu" (gloo) or "cuda" (NCCL, one GPU per rank).
        Raises:
            UsageError: the roles are empty or leave ranks out, or there are too few GPUs.
            WorkerError: a rank could not start.
        """
        self.roles = {role: tuple(ranks) for role, ranks in roles.items()}
        self.ranks = _check_roles(self.roles)
        self.timeout_s = timeout_s
        self._error: Exception | None = None
        self._stopped = False
        self._faults: list[Fault] = []
        self._dead: set[int] = set()
        self._pending: dict[int, Pending] = {}
        self._ids = itertools.count(STARTED)
        self._processes = new_processes()
        self._finalizer = weakref.finalize(self, self._processes.end)
        try:
            self._processes.start(
                self.roles,
                world_size=len(self.ranks),
                threads=threads,
                timeout_s=timeout_s,
                device=device,
            )
            started = self._expect(label="start", ranks=self.ranks, collect="all")
            self._wait_for(started, timeout_s=max(timeout_s, START_S))
        except BaseException as error:
            self._end(because=error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def spawn(
        self,
        key: str,
        factory: Callable[..., Any],
        *args: Any,
        role: str | Sequence[str],
        **kwargs: Any,
    ) -> WorkerGroup:
        """Build `factory(context, *args, **kwargs)` on every rank of the role(s).

        `factory` must be importable by name on the ranks. Whatever is built later on the same ranks
        finds the object as `context.objects[key]`. Errors as `Pending.result`.
        """
        ranks = self.ranks_of(role)
        payload = (key, factory, args, kwargs)
        self._submit("spawn", payload, label=f"building {key}", ranks=ranks).result()
        return WorkerGroup(key=key, ranks=ranks, workers=self)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        role: str | Sequence[str],
        **kwargs: Any,
    ) -> list[Any]:
        """`function(context, *args, **kwargs)` on every rank of the role(s), in the order of
        `ranks_of`. Errors as `spawn`."""
        label = getattr(function, "__name__", "function")
        ranks = self.ranks_of(role)
        results: list[Any] = self._submit(
            "run", (function, args, kwargs), label=label, ranks=ranks
        ).result()
        return results

    def ranks_of(self, role: str | Sequence[str]) -> tuple[int, ...]:
        """Global ranks of one or several roles, in the order of the roles and without repeats."""
        names = (role,) if isinstance(role, str) else tuple(role)
        if not names or not set(names) <= set(self.roles):
            raise UsageError(f"role={role!r} is unknown; choose from {', '.join(self.roles)}")
        return tuple(dict.fromkeys(rank for name in names for rank in self.roles[name]))

    @property
    def folder(self) -> Path:
        """Temporary folder of this world; gone after `stop`."""
        return self._processes.folder

    def pids(self) -> dict[int, int]:
        """Process id of each rank."""
        pids = {rank: process.pid for rank, process in self._processes.by_rank.items()}
        return {rank: pid for rank, pid in pids.items() if pid is not None}

    def alive(self) -> bool:
        """True while every rank runs and none has failed."""
        running = all(process.is_alive() for process in self._processes.by_rank.values())
        return running and not self._stopped

    def stop(self) -> None:
        """End every process and remove the temporary folder. Idle ranks leave by themselves, busy
        ones are killed. Safe to repeat."""
        if not self._stopped and not self._pending:
            self._ask_to_leave()
        self._stopped = True
        self._finalizer()

    def _end(self, *, because: BaseException) -> None:
        self._error = because if isinstance(because, Exception) else WorkerError("interrupted")
        self._stopped = True
        self._finalizer()

    def _ask_to_leave(self) -> None:
        for connection in self._processes.connections.values():
            with suppress(OSError):  # already gone, which is what is asked
                connection.send_bytes(pickle.dumps((-1, "stop", b"")))
        deadline = time.monotonic() + STOP_S
        for process in self._processes.by_rank.values():
            process.join(max(0.0, deadline - time.monotonic()))

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({', '.join(r for r, ranks in self.roles.items() if rank in ranks)})"

    def _expect(self, *, label: str, ranks: tuple[int, ...], collect: Collect) -> Pending:
        pending = Pending(
            workers=self,
            call_id=next(self._ids),
            label=label,
            ranks=ranks,
            collect=COLLECTORS[collect],
        )
        self._pending[pending.call_id] = pending
        return pending

    def _submit(
        self,
        operation: str,
        payload: tuple[Any, ...],
        *,
        label: str,
        ranks: tuple[int, ...],
        collect: Collect = "all",
    ) -> Pending:
        self._check_running(label)
        blob = _pickled(payload, label)
        pending = self._expect(label=label, ranks=ranks, collect=collect)
        message = pickle.dumps((pending.call_id, operation, blob), protocol=5)
        try:
            for rank in ranks:
                with suppress(BrokenPipeError):  # it is gone: result() says how it ended
                    self._processes.connections[rank].send_bytes(message)
        except BaseException as error:  # half a message is in the pipe: nothing can follow it
            self._end(because=error)
            raise
        return pending

    def _check_running(self, label: str) -> None:
        if self._error is not None:
            raise WorkerError(
                f"cannot do {label}: the workers were stopped by an earlier failure ({self._error})"
            )
        if self._stopped:
            raise WorkerError(f"cannot do {label}: the workers were stopped")

    def _wait_for(self, pending: Pending, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while pending.missing() or self._faults:
            self._check_running(pending.label)
            now = time.monotonic()
            if self._faults:
                deadline = min(deadline, self._faults[0].at_s + SETTLE_S)
            if self._faults and (now >= deadline or self._is_settled()):
                self._fail(culprit(self._faults).error)
            if now >= deadline:
                self._fail(self._timeout(pending, timeout_s))
            self._pump(deadline - now)

    def _is_settled(self) -> bool:
        """A culprit is known, and no rank is still to answer."""
        is_known = any(not fault.is_echo for fault in self._faults)
        return is_known and not any(pending.missing() for pending in self._pending.values())

    def _timeout(self, pending: Pending, timeout_s: float) -> WorkerTimeout:
        missing = pending.missing()
        stacks = "".join(
            f"\n\n{self._name(rank)} is in:\n"
            f"{stack_of(self._processes.by_rank[rank], stack_file(self.folder, rank))}"
            for rank in missing
        )
        return WorkerTimeout(
            f"{pending.label}: no answer within {timeout_s:g} s from "
            f"{', '.join(self._name(rank) for rank in missing)}; "
            f"raise workers.timeout-s if the work is that long{stacks}"
        )

    def _fail(self, error: Exception) -> None:
        self._end(because=error)
        raise error

    def _pump(self, timeout_s: float) -> None:
        """Take in whatever comes first within `timeout_s`: answers, or the end of a process."""
        living = {r: p for r, p in self._processes.by_rank.items() if r not in self._dead}
        sources: dict[Any, int] = {p.sentinel: rank for rank, p in living.items()}
        sources |= {self._processes.connections[rank]: rank for rank in living}
        for rank in {sources[ready] for ready in wait(list(sources), timeout_s)}:
            has_ended = living[rank].exitcode is not None
            pipe_is_open = self._take_answers(rank)
            if not pipe_is_open:
                living[rank].join(STOP_S)  # the pipe closes just before the process is gone
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
        except KeyboardInterrupt as error:  # perhaps amid a message: nothing after it can be read
            self._end(because=error)
            raise
        return True

    def _take(self, rank: int, call_id: int, ok: bool, blob: bytes) -> None:
        pending = self._pending[call_id]
        pending.blobs[rank] = blob
        if not ok:
            where = f"{self._name(rank)} raised in {pending.label}"
            self._faults.append(raised(pickle.loads(blob), where=where))
        if not pending.missing():
            del self._pending[call_id]

    def _note_death(self, rank: int) -> None:
        labels = [p.label for p in self._pending.values() if rank in p.missing()]
        process, label = self._processes.by_rank[rank], labels[0] if labels else None
        self._dead.add(rank)
        self._faults.append(died(process, who=self._name(rank), label=label))


def _check_roles(roles: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    ranks = sorted({rank for role_ranks in roles.values() for rank in role_ranks})
    has_gap = not ranks or ranks != list(range(len(ranks))) or not all(roles.values())
    if has_gap or any(len(set(role_ranks)) < len(role_ranks) for role_ranks in roles.values()):
        raise UsageError(
            f"roles={dict(roles)}; give every role one rank or more, none of them twice, and leave "
            f"no rank from 0 up without a role"
        )
    return tuple(ranks)


def _pickled(payload: tuple[Any, ...], label: str) -> bytes:
    for part in payload:
        if callable(part) and getattr(part, "__module__", None) == "__main__":
            raise UsageError(
                f"{label}: {getattr(part, '__name__', part)} is defined in the main script, which "
                "workers do not import; move it to a module of its own"
            )
    try:
        return pickle.dumps(payload, protocol=5)
    except Exception as error:  # whatever the objects' own reduce methods raise
        raise UsageError(
            f"{label}: an argument cannot be sent to a worker process ({error}); "
            "use data and module-level functions"
        ) from error
