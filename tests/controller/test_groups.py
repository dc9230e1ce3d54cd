"""Worker processes: results by rank, and a named error for every way in which a rank can fail."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardloop.config import WorkersConfig
from shardloop.controller import groups, launch
from shardloop.controller.groups import LocalWorkers
from shardloop.controller.launch import Processes
from shardloop.errors import (
    LayoutError,
    PlanError,
    UsageError,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from shardloop.parallel.agree import agree
from shardloop.parallel.signals import ENDING
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]


class Part:
    """An object on a rank; the methods are the ways to succeed and to fail."""

    version = 7

    def __init__(self, context: Any, scale: float) -> None:
        self.context = context
        self.scale = scale

    def scaled_rank(self, *, plus: float = 0.0) -> dict[str, Any]:
        return {
            "value": self.context.rank * self.scale + plus,
            "vector": torch.ones(2) * self.context.rank,
        }

    def raise_alone(self, rank: int, kind: type[Exception]) -> None:
        self._meet_unless(self.context.rank == rank, lambda: _raise(kind("the cause")))

    def die_alone(self, rank: int) -> None:
        self._meet_unless(self.context.rank == rank, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def hang_alone(self, rank: int) -> None:
        self._meet_unless(self.context.rank == rank, lambda: time.sleep(60))

    def stop_alone(self, rank: int) -> None:
        self._meet_unless(self.context.rank == rank, lambda: os.kill(os.getpid(), signal.SIGSTOP))

    def leave_alone(self, rank: int) -> None:
        self._meet_unless(self.context.rank == rank, lambda: os._exit(3))

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "rested"

    def echo(self, value: Any) -> Any:
        return value

    def warn(self, text: str) -> None:
        logging.getLogger("shardloop.test").warning(text)

    def unsendable(self) -> Any:
        return threading.Lock()

    def _meet_unless(self, alone: bool, act: Any) -> None:
        if alone:
            time.sleep(0.1)
            act()
        dist.all_reduce(torch.zeros(1))


def _raise(error: Exception) -> None:
    raise error


def _meet_in_roles(context: Any) -> dict[str, Any]:
    total = torch.tensor([float(context.rank)])
    dist.all_reduce(total)
    out: dict[str, Any] = {"world": total.item(), "threads": torch.get_num_threads()}
    for role in context.roles:
        if context.has(role):
            tensor = torch.tensor([float(context.rank)])
            dist.all_reduce(tensor, group=context.group(role))
            out[role] = (tensor.item(), context.role_rank(role))
    return out


def _sum_of_partner(context: Any) -> float:
    return context.objects["first"].scale + context.rank


def _raise_early(context: Any) -> None:
    if context.rank == 0:
        raise ValueError("rank 0 has a bug")
    dist.barrier()


def _die_in_building(context: Any) -> None:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _refuse_on_rank_1(context: Any) -> None:
    fault = PlanError("rank 1 misses a tensor") if context.rank == 1 else None
    group = context.group("all")
    try:
        agree(group, fault=fault, same="plan", what="the transfer", timeout_s=30.0)
    finally:
        time.sleep(0.3 * context.rank)  # the refusal is reported last


def _collective_timeout(context: Any) -> float:
    return context.collective_timeout_s


def _server_pid() -> int:
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid


def _wait_until_gone(pids: list[int], timeout_s: float = 10.0) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


@pytest.fixture
def workers() -> Any:
    with LocalWorkers({"trainer": (0, 1), "engine": (2,)}, WorkersConfig(timeout_s=30.0)) as made:
        yield made
    assert _wait_until_gone(list(made.pids().values())) == []


def test_each_role_reduces_over_its_own_ranks_and_the_world_over_all() -> None:
    results = run_ranks(_meet_in_roles, 3, roles={"trainer": (0, 1), "engine": (2, 1)})
    assert [result["world"] for result in results] == [3.0, 3.0, 3.0]
    assert [result["threads"] for result in results] == [1, 1, 1]
    assert [result.get("trainer") for result in results] == [(1.0, 0), (1.0, 1), None]
    assert [result.get("engine") for result in results] == [None, (3.0, 1), (3.0, 0)]


def test_answers_come_by_rank_and_collect_says_what_becomes_of_them(workers: LocalWorkers) -> None:
    group = workers.spawn("first", Part, 10.0, role=["engine", "trainer"])
    assert group.ranks == (2, 0, 1)
    everyone = group.call("scaled_rank", plus=1.0)
    assert [answer["value"] for answer in everyone] == [21.0, 1.0, 11.0]
    assert group.call("scaled_rank", collect="first")["value"] == 20.0
    total = group.call("scaled_rank", collect="sum")
    assert total["value"] == 30.0 and total["vector"].tolist() == [3.0, 3.0]
    assert group.call("version", collect="same") == 7
    with pytest.raises(WorkerError, match="ranks must agree"):
        group.call("scaled_rank", collect="same")
    assert workers.run(_sum_of_partner, role="engine") == [12.0]


def test_submitted_calls_are_answered_in_any_order_of_asking(workers: LocalWorkers) -> None:
    trainer = workers.spawn("trainer", Part, 1.0, role="trainer")
    engine = workers.spawn("engine", Part, 100.0, role="engine")
    slow, first, second = (
        trainer.submit("nap", 0.2),
        trainer.submit("version"),
        engine.submit("version"),
    )
    assert second.result() == [7]
    assert first.result() == [7, 7]
    assert slow.result() == ["rested", "rested"] and slow.result() == ["rested", "rested"]


def test_large_arguments_and_answers_in_both_directions_do_not_block(workers: LocalWorkers) -> None:
    big = torch.arange(500_000)
    group = workers.spawn("part", Part, 1.0, role=["trainer", "engine"])
    pending = [group.submit("echo", big) for _ in range(3)]
    for answer in pending:
        assert all(torch.equal(value, big) for value in answer.result())


def _echo(context: Any, value: Any) -> Any:
    return value


def test_an_error_of_ours_keeps_its_type_and_names_the_rank(workers: LocalWorkers) -> None:
    group = workers.spawn("part", Part, 1.0, role=["trainer", "engine"])
    with pytest.raises(LayoutError, match="the cause") as caught:
        group.call("raise_alone", 1, LayoutError)
    assert str(caught.value) == "the cause"
    assert "rank 1 (trainer) raised in part.raise_alone" in caught.value.__notes__[0]
    with pytest.raises(
        WorkerError, match=r"cannot do part\.version.*stopped by an earlier failure \(the cause\)"
    ):
        group.call("version")
    assert not group.alive()


def test_any_other_error_names_the_rank_that_raised_it_though_the_others_wait_for_it(
    workers: LocalWorkers,
) -> None:
    group = workers.spawn("part", Part, 1.0, role=["trainer", "engine"])
    start = time.monotonic()
    with pytest.raises(
        WorkerError, match=r"rank 2 \(engine\) raised in part.raise_alone: KeyError: 'the cause'"
    ) as caught:
        group.call("raise_alone", 2, KeyError)
    assert "_meet_unless" in str(caught.value)
    assert time.monotonic() - start < 15.0


@pytest.mark.parametrize(
    ("method", "how"),
    [("die_alone", "was killed by SIGKILL"), ("leave_alone", "exited with code 3")],
)
def test_a_dead_rank_is_named_at_once_and_not_the_peers_that_lost_it(
    workers: LocalWorkers, method: str, how: str
) -> None:
    group = workers.spawn("part", Part, 1.0, role=["trainer", "engine"])
    start = time.monotonic()
    with pytest.raises(WorkerDied, match=rf"^rank 1 \(trainer\) {how} during part\.{method}$"):
        group.call(method, 1)
    assert time.monotonic() - start < 15.0


def test_a_rank_that_died_between_calls_is_named_by_the_next_one(workers: LocalWorkers) -> None:
    group = workers.spawn("part", Part, 1.0, role="trainer")
    os.kill(workers.pids()[2], signal.SIGKILL)
    assert _wait_until_gone([workers.pids()[2]]) == []
    assert not workers.alive()
    with pytest.raises(WorkerDied, match=r"rank 2 \(engine\) was killed by SIGKILL"):
        group.call("nap", 0.5)


@pytest.mark.parametrize(
    ("method", "how", "where"),
    [("hang_alone", "", "in hang_alone"), ("stop_alone", ", stopped by a signal", "SIGSTOP")],
)
def test_a_silent_rank_is_named_apart_from_those_that_wait_for_it(
    method: str, how: str, where: str
) -> None:
    with LocalWorkers({"trainer": (0, 1)}, WorkersConfig(timeout_s=4.0)) as workers:
        group = workers.spawn("part", Part, 1.0, role="trainer")
        with pytest.raises(WorkerTimeout) as caught:
            group.call(method, 1)
    message = str(caught.value)
    assert message.startswith(
        f"part.{method}: no answer within 4 s from rank 1 (trainer){how} (held up by that: "
        "rank 0 (trainer)); raise workers.timeout-s"
    )
    assert where in message.split("rank 1 (trainer) is in:")[1]
    assert "in all_reduce" in message.split("rank 0 (trainer) is in:")[1]
    assert _wait_until_gone(list(workers.pids().values())) == []


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (signal.SIGKILL, WorkerDied, r"^rank 1 \(trainer\) was killed by SIGKILL during start$"),
        (signal.SIGSTOP, WorkerTimeout, r"^start: .* from rank 1 \(trainer\), stopped by a signal"),
    ],
)
def test_a_rank_lost_while_the_world_forms_is_named(
    monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception], message: str
) -> None:
    pids: list[int] = []
    start = Processes.start

    def start_and_hit(self: Processes, *args: Any) -> None:
        start(self, *args)
        pids.extend(process.pid or 0 for process in self.by_rank.values())
        os.kill(pids[1], number)

    monkeypatch.setattr(Processes, "start", start_and_hit)
    monkeypatch.setattr(groups, "START_S", 4.0)
    with pytest.raises(error, match=message):
        LocalWorkers({"trainer": (0, 1)}, WorkersConfig(timeout_s=4.0))
    assert _wait_until_gone(pids) == []


def test_a_rank_that_dies_while_it_builds_is_named(workers: LocalWorkers) -> None:
    with pytest.raises(WorkerDied, match=r"^rank 1 \(trainer\) was killed by SIGKILL during "):
        workers.spawn("part", _die_in_building, role=["trainer", "engine"])


def test_the_rank_that_refuses_is_heard_before_those_that_could_have_gone_on() -> None:
    with pytest.raises(PlanError) as caught:
        run_ranks(_refuse_on_rank_1, 2)
    assert str(caught.value) == "rank 1 misses a tensor"


def test_collectives_give_up_later_than_the_driver_however_long_it_waits() -> None:
    longest = 1e7
    assert min(run_ranks(_collective_timeout, 2, timeout_s=longest)) > longest


def test_what_cannot_be_sent_is_refused_and_the_workers_live_on(workers: LocalWorkers) -> None:
    group = workers.spawn("part", Part, 1.0, role="engine")
    with pytest.raises(UsageError, match=r"part\.nap: an argument cannot be sent"):
        group.call("nap", threading.Lock())
    with pytest.raises(UsageError, match="cannot be sent"):
        workers.run(lambda context: 1, role="engine")
    with pytest.raises(UsageError, match="role='nobody' is unknown; choose from trainer, engine"):
        workers.run(_echo, 1, role="nobody")
    assert group.call("version") == [7]
    with pytest.raises(WorkerError, match="cannot pickle"):
        group.call("unsendable")


@pytest.mark.parametrize("roles", [{}, {"a": ()}, {"a": (1, 2)}, {"a": (0, 2)}, {"a": (0, 0)}])
def test_roles_that_leave_ranks_out_are_refused(roles: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(UsageError, match="roles="):
        LocalWorkers(roles)


def test_only_the_driver_heeds_the_signals_that_end_programs(workers: LocalWorkers) -> None:
    group = workers.spawn("part", Part, 1.0, role=["trainer", "engine"])
    for pid in (*workers.pids().values(), _server_pid()):
        for number in ENDING:
            os.kill(pid, number)
    threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        group.call("nap", 0.6)
    assert group.call("version") == [7, 7, 7]
    workers.stop()
    assert not workers.alive() and not workers.folder.exists()
    with pytest.raises(WorkerError, match=r"the workers were stopped$"):
        group.call("version")


def test_a_dead_fork_server_is_one_error_and_leaves_no_rank_behind() -> None:
    workers = LocalWorkers({"trainer": (0, 1)})
    group = workers.spawn("part", Part, 1.0, role="trainer")
    os.kill(workers.pids()[1], signal.SIGSTOP)  # it does not notice that the driver lets go
    waiting = group.submit("nap", 60)
    os.kill(_server_pid(), signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"^the fork server.* died .* during part\.nap$"):
        waiting.result()
    assert _wait_until_gone(list(workers.pids().values())) == []
    assert not workers.folder.exists()


def test_a_fork_server_that_dies_before_it_serves_is_an_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect = forkserver.connect_to_new_process

    def connect_and_kill(descriptors: list[int]) -> tuple[int, int]:
        pipes = connect(descriptors)
        os.kill(_server_pid(), signal.SIGKILL)  # it still imports torch, which takes seconds
        return pipes

    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    monkeypatch.setattr(forkserver, "connect_to_new_process", connect_and_kill)
    with pytest.raises(WorkerDied, match=r"^the fork server died .* before rank 0 trainer"):
        LocalWorkers({"trainer": (0, 1)})


def test_a_folder_for_temporary_files_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    program = "from shardloop.controller import launch; launch._fork_server()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TMPDIR": str(deep)},
        capture_output=True,
        text=True,
    )
    assert f"UsageError: sockets cannot be made in the folder for temporary files, {deep}" in (
        done.stderr
    )


def test_a_stuck_fork_server_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "STOP_S", 0.3)
    monkeypatch.setattr(launch, "END_S", 0.3)
    workers = LocalWorkers({"trainer": (0, 1)})
    os.kill(_server_pid(), signal.SIGSTOP)
    start = time.monotonic()
    workers.stop()
    assert time.monotonic() - start < 10.0
    assert _wait_until_gone(list(workers.pids().values())) == []


def test_an_interrupt_amid_the_end_waits_until_all_is_clean(
    workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def interrupted_remove(path: Path, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        remove(path, **kwargs)

    monkeypatch.setattr(launch.shutil, "rmtree", interrupted_remove)
    with pytest.raises(KeyboardInterrupt):
        workers.stop()
    assert not workers.folder.exists()


_DRIVER = """
import weakref
weakref.finalize(weakref.WeakSet, print)  # clean-ups that are registered early run late
import sys, time
from shardloop.controller.groups import LocalWorkers
from shardloop.errors import UsageError
from tests.controller.test_groups import Part

def main_function(context):
    pass

workers = LocalWorkers({"all": (0, 1)})
group = workers.spawn("part", Part, 1.0, role="all")
print(*workers.pids().values(), workers.folder, flush=True)
if sys.argv[1] == "killed":
    group.submit("nap", 60)
    time.sleep(60)
try:
    workers.run(main_function, role="all")
except UsageError as error:
    group.call("warn", str(error))
    sys.exit(1)
"""


@pytest.mark.parametrize("ending", ["killed", "forgets to stop"])
def test_workers_end_with_their_driver_however_it_ends(ending: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER, ending],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        *pids, folder = driver.stdout.readline().split()
        if ending == "killed":
            driver.kill()
        _, errors = driver.communicate(timeout=120)
    assert _wait_until_gone([int(pid) for pid in pids]) == []
    assert not Path(folder).exists()
    if ending == "killed":
        assert errors == ""
        return
    tags = [line.partition("WARNING")[0].strip() for line in errors.splitlines()]
    assert sorted(tags) == ["[rank 0 all]", "[rank 1 all]"]
    assert all("main_function is defined in the main script" in e for e in errors.splitlines())


def test_the_first_error_leaves_run_ranks_at_once() -> None:
    with pytest.raises(WorkerError, match="rank 0 has a bug"):
        run_ranks(_raise_early, 2)
