"""Worker groups: the processes of this machine as objects with methods. Floor 4.

Called by runs, by `controller.sft` and `controller.inference`, and by tests and notebooks.

    LocalWorkers ──spawn──▶ WorkerGroup ──submit──▶ Pending ──result──▶ one value per rank
         │
         ├─ one process per rank (`controller.launch`), which runs `parallel.worker`
         ├─ a watch over them (`controller.watch`), which takes answers and notices failures
         ├─ one torch.distributed world over all ranks, and one process group per role
         └─ commands and small answers as pickle bytes over one pipe per rank; never weights

The first failure ends all ranks: the others may sit in a collective that cannot finish, and a
process group is of no use after that. The error names the rank that failed on its own, not the
peers whose connections broke. Afterwards every call repeats that the workers are stopped, and why.
All calls come from one thread of the driver.
"""

import pickle
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Self

from shardloop.config import WorkersConfig
from shardloop.controller.collect import COLLECTORS, Collect
from shardloop.controller.launch import Processes
from shardloop.controller.watch import Expected, Watch
from shardloop.errors import UsageError, WorkerError

STOP_S = 3.0
"""Time an idle rank gets to leave by itself."""
START_S = 120.0
"""Least time for a start: the first one waits for the fork server to import torch."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """The answer of a `submit`, still to come."""

    workers: "LocalWorkers"
    expected: Expected
    collect: Callable[[list[Any]], Any]

    def result(self) -> Any:
        """Wait for every rank and collect.

        Raises:
            ShardloopError: a rank raised it, as that type; a note holds the remote traceback.
            WorkerError: a rank raised anything else, or the workers had already stopped.
            WorkerDied: a process went away.
            WorkerTimeout: ranks did not answer in time.
        """
        self.workers._wait_for(self.expected, timeout_s=self.workers.timeout_s)
        blobs = self.expected.blobs
        return self.collect([pickle.loads(blobs[rank]) for rank in self.expected.ranks])


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

    def split(self, num_parts: int) -> "list[WorkerGroup]":
        """Groups of equally many ranks in their order, which can be called on their own."""
        size, rest = divmod(len(self.ranks), num_parts)
        assert rest == 0, f"{len(self.ranks)} ranks cannot be {num_parts} equal parts"
        starts = range(0, len(self.ranks), size)
        return [replace(self, ranks=self.ranks[start : start + size]) for start in starts]

    def alive(self) -> bool:
        return self.workers.alive()

    def stop(self) -> None:
        """Stop all workers, this group's and the others': they share one world."""
        self.workers.stop()


class LocalWorkers:
    """Processes of this machine, one per rank; a context manager that stops them."""

    def __init__(
        self, roles: Mapping[str, Sequence[int]], config: WorkersConfig | None = None
    ) -> None:
        """
        Args:
            roles: global ranks of each role. Together they are 0..n-1; a rank may have several.
            config: device, CPU threads of each rank, and the longest wait for a call; by default
                as `WorkersConfig`.
        Raises:
            UsageError: the roles are empty or leave ranks out, or there are too few GPUs.
            WorkerError: a rank could not start.
        """
        config = WorkersConfig() if config is None else config
        self.roles = {role: tuple(ranks) for role, ranks in roles.items()}
        self.ranks = _check_roles(self.roles)
        self.timeout_s = config.timeout_s
        self._error: Exception | None = None
        self._stopped = False
        self._processes = Processes(folder=Path(tempfile.mkdtemp(prefix="shardloop-")))
        # Unlike weakref's, it comes before multiprocessing waits for its processes at exit.
        self._finalizer = Finalize(self, self._processes.end, exitpriority=0)
        self._watch = Watch(self._processes, name=self._name)
        try:
            self._processes.start(self.roles, config)
            started = self._watch.expect(label="start", ranks=self.ranks)
            self._wait_for(started, timeout_s=max(self.timeout_s, START_S))
        except BaseException as error:
            self._end(because=error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        try:
            if not self._stopped and self._watch.is_idle:
                self._ask_to_leave()
        finally:
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
        expected = self._watch.expect(label=label, ranks=ranks)
        message = pickle.dumps((expected.call_id, operation, blob), protocol=5)
        try:
            for rank in ranks:
                with suppress(BrokenPipeError):  # it is gone: result() says how it ended
                    self._processes.connections[rank].send_bytes(message)
        except BaseException as error:  # half a message is in the pipe: nothing can follow it
            self._end(because=error)
            raise
        return Pending(workers=self, expected=expected, collect=COLLECTORS[collect])

    def _check_running(self, label: str) -> None:
        if self._error is not None:
            raise WorkerError(
                f"cannot do {label}: the workers were stopped by an earlier failure ({self._error})"
            )
        if self._stopped:
            raise WorkerError(f"cannot do {label}: the workers were stopped")

    def _wait_for(self, expected: Expected, *, timeout_s: float) -> None:
        if expected.missing() or self._error is not None:
            self._check_running(expected.label)
        try:
            self._watch.wait_for(expected, timeout_s=timeout_s)
        except Exception as error:
            self._end(because=error)
            raise
        except KeyboardInterrupt as error:
            if self._watch.is_torn:
                self._end(because=error)
            raise


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
