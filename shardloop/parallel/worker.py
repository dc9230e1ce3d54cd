"""One rank of a worker group: how it joins the others, and its command loop. Floor 3.

Started by `controller.launch`, commanded by `controller.groups`.

    driver ──command──▶ reader thread ──queue──▶ main thread ──answer──▶ driver
                          │
                          └── pipe closed: the driver is gone, exit at once

The reader always drains the pipe, so the driver's sends never wait for a busy rank. A command that
raises is answered by a `Failure`; the rank lives on until the driver stops it, so that its peers
see no closed connection meanwhile.
"""

import faulthandler
import logging
import os
import pickle
import queue
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardloop.errors import UsageError
from shardloop.parallel.context import RankContext
from shardloop.parallel.failure import describe
from shardloop.parallel.signals import ignore_ending

STARTED = 0
"""Id of the answer that says a rank has joined the world."""


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What the driver tells a rank when it starts it."""

    rank: int
    world_size: int
    roles: Mapping[str, tuple[int, ...]]
    device: str
    threads: int
    collective_timeout_s: float
    folder: Path
    """Holds the rendezvous store and the stack dump of each rank; the driver removes it."""
    environment: Mapping[str, str]
    log_level: int

    @property
    def tag(self) -> str:
        names = "+".join(name for name, ranks in self.roles.items() if self.rank in ranks)
        return f"rank {self.rank} {names}"


def stack_file(folder: Path, rank: int) -> Path:
    """Where a rank dumps its stacks on SIGUSR1."""
    return folder / f"stack-{rank}"


def worker_main(settings: WorkerSettings, connection: Connection) -> None:
    """Join the world, then obey commands until told to stop.

    Leaves by `os._exit`, so that no library prints or waits at exit.
    """
    ignore_ending()
    os.environ.update(settings.environment)
    with stack_file(settings.folder, settings.rank).open("w") as dump:
        faulthandler.register(signal.SIGUSR1, file=dump)
        _configure_logging(settings)
        commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(
            target=_read, args=(connection, commands, settings.folder), daemon=True
        ).start()
        _obey(settings, connection, commands)
    _leave(0)


def _obey(
    settings: WorkerSettings, connection: Connection, commands: "queue.SimpleQueue[bytes]"
) -> None:
    context: RankContext | None = None
    try:
        context = _join_world(settings)
    except Exception as error:
        _answer(connection, STARTED, ok=False, value=describe(error))
    else:
        _answer(connection, STARTED, ok=True, value=None)
    while True:
        call_id, operation, payload = pickle.loads(commands.get())
        if operation == "stop":
            return
        assert context is not None, "the driver only stops ranks that could not start"
        try:
            value = _OPERATIONS[operation](context, *pickle.loads(payload))
            blob = pickle.dumps(value, protocol=5)
        except BaseException as error:
            _answer(connection, call_id, ok=False, value=describe(error))
        else:
            _send(connection, call_id, ok=True, blob=blob)


def _read(connection: Connection, commands: "queue.SimpleQueue[bytes]", folder: Path) -> None:
    try:
        while True:
            commands.put(connection.recv_bytes())
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        _leave(1)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join_world(settings: WorkerSettings) -> RankContext:
    """Collective over all ranks: the default group, then one group per role in the same order."""
    torch.set_num_threads(settings.threads)
    device = _device(settings)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    timeout = timedelta(seconds=settings.collective_timeout_s)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{settings.folder}/store",
        rank=settings.rank,
        world_size=settings.world_size,
        timeout=timeout,
    )
    groups = {
        role: dist.new_group(list(ranks), timeout=timeout) for role, ranks in settings.roles.items()
    }
    return RankContext(
        rank=settings.rank,
        world_size=settings.world_size,
        device=device,
        roles=settings.roles,
        groups=groups,
        collective_timeout_s=settings.collective_timeout_s,
    )


def _device(settings: WorkerSettings) -> torch.device:
    if settings.device == "cpu":
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if settings.world_size > num_devices:
        raise UsageError(
            f"workers.device={settings.device} with {settings.world_size} ranks, but this machine "
            f"has {num_devices} GPUs and every rank needs its own: use smaller layouts, "
            f"workers.colocate or workers.device=cpu"
        )
    torch.cuda.set_device(settings.rank)
    return torch.device("cuda", settings.rank)


def _configure_logging(settings: WorkerSettings) -> None:
    logging.basicConfig(
        level=settings.log_level,
        format=f"[{settings.tag}] %(levelname)s %(name)s: %(message)s",
        force=True,
    )


def _answer(connection: Connection, call_id: int, *, ok: bool, value: Any) -> None:
    _send(connection, call_id, ok=ok, blob=pickle.dumps(value, protocol=5))


def _send(connection: Connection, call_id: int, *, ok: bool, blob: bytes) -> None:
    try:
        connection.send_bytes(pickle.dumps((call_id, ok, blob), protocol=5))
    except OSError:
        _leave(1)  # the driver is gone


def _spawn(
    context: RankContext, key: str, factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    context.objects[key] = factory(context, *args, **kwargs)


def _call(
    context: RankContext,
    key: str,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    answering: frozenset[int],
) -> Any:
    member = getattr(context.objects[key], method)
    value = member(*args, **kwargs) if callable(member) else member
    return value if context.rank in answering else None


def _run(context: RankContext, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(context, *args, **kwargs)


_OPERATIONS: dict[str, Any] = {"spawn": _spawn, "call": _call, "run": _run}
