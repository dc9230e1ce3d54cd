"""Starts and ends the worker processes of this machine. Called by `controller.groups`. Floor 4.

    driver ──asks──▶ fork server (has imported torch) ──fork──▶ one process per rank

The driver itself is never forked: it may be a notebook, hold threads or use a GPU.
"""

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from shardloop.config import WorkersConfig
from shardloop.errors import UsageError, WorkerDied
from shardloop.parallel.signals import children_spared, postponed
from shardloop.parallel.worker import WorkerSettings, worker_main

PRELOAD = "shardloop.parallel.preload"
LOST_EXIT_CODE = 255
"""What multiprocessing reports when the fork server can no longer tell how a rank ended."""
END_S = 5.0
"""Time for killed ranks to be reported; a fork server that is silent for longer is stuck."""
COLLECTIVE_GRACE_S = 30.0
"""Collectives give up this much later than calls, so that the driver first names a hang."""
SERVER_ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""What the fork server needs at its own start: where this library is, and a quiet C++ side."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The ranks as the operating system sees them; filled as they start."""

    folder: Path
    by_rank: dict[int, BaseProcess] = field(default_factory=dict)
    connections: dict[int, Connection] = field(default_factory=dict)

    def start(self, roles: Mapping[str, tuple[int, ...]], config: WorkersConfig) -> None:
        """Start every rank of the roles; each answers under `STARTED` when all have met.

        Raises:
            WorkerDied: the fork server went away. UsageError: it cannot be reached where temporary
                files are.
        """
        context = _fork_server()
        world_size = len({rank for ranks in roles.values() for rank in ranks})
        with _hidden_main():
            for rank in range(world_size):
                settings = WorkerSettings(
                    rank=rank,
                    world_size=world_size,
                    roles=roles,
                    device=config.device,
                    threads=config.threads,
                    collective_timeout_s=config.timeout_s + COLLECTIVE_GRACE_S,
                    folder=self.folder,
                    environment=dict(os.environ),
                    log_level=logging.getLogger("shardloop").getEffectiveLevel(),
                )
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=worker_main, args=(settings, theirs), name=settings.tag, daemon=True
                )
                # Noted first: an interrupt may come as soon as the process runs.
                self.by_rank[rank], self.connections[rank] = process, ours
                try:
                    process.start()
                except (EOFError, ConnectionError) as error:
                    raise WorkerDied(
                        f"the fork server died (killed, or out of memory) before {settings.tag} "
                        "had started"
                    ) from error
                theirs.close()

    def end(self) -> None:
        """Kill what still runs, wait for all, remove the temporary folder.

        Nothing interrupts it: a signal takes effect afterwards.
        """
        with postponed():
            for connection in self.connections.values():
                connection.close()
            started = [process for process in self.by_rank.values() if process.pid is not None]
            for process in started:
                if process.exitcode in (None, LOST_EXIT_CODE):
                    _kill(process.pid)
            for process in started:
                process.join(END_S)
            if any(process.exitcode is None for process in started):
                _kill(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
                for process in started:
                    process.join()
            shutil.rmtree(self.folder, ignore_errors=True)


def _kill(pid: int | None) -> None:
    assert pid is not None, "it has been started"
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _fork_server() -> ForkServerContext:
    """The multiprocessing context whose server imports torch once for all of the ranks.

    Raises:
        UsageError: the path of the folder for temporary files is too long for a socket.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    before = {name: os.environ.get(name) for name in SERVER_ENVIRONMENT}
    paths = (SERVER_ENVIRONMENT["PYTHONPATH"], before["PYTHONPATH"])
    os.environ |= SERVER_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        with children_spared():
            resource_tracker.ensure_running()  # its start unblocks signals
        with children_spared():
            forkserver.ensure_running()
    except OSError as error:
        if "too long" not in str(error):
            raise
        raise UsageError(
            f"sockets cannot be made in the folder for temporary files, {tempfile.gettempdir()}: "
            "its path is too long; set TMPDIR to one of at most 60 characters"
        ) from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


@contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep multiprocessing from running the driver's main script again in every worker.

    It would: a script without a main guard would start workers of workers, and a notebook or `-c`
    has no script. Functions for workers are imported by module name, never taken from `__main__`.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
