"""Which of several failures is the cause, and how answers of ranks are collected; no processes."""

import random
import socket
from types import SimpleNamespace

import pytest
import torch

from shardloop.config import TrainConfig, WorkersConfig
from shardloop.controller import roles
from shardloop.controller.collect import COLLECTORS
from shardloop.controller.faults import STOPPED, Fault, blame, culprit
from shardloop.controller.placement import Placement
from shardloop.errors import PlanError, UsageError, WorkerDied, WorkerError
from shardloop.parallel.agree import OtherRankRefused
from shardloop.parallel.failure import describe


def _fault(name: str, *, is_echo: bool, at_s: float) -> Fault:
    return Fault(error=WorkerError(name), is_echo=is_echo, at_s=at_s)


def test_the_culprit_is_the_first_that_failed_on_its_own_in_any_order_of_arrival(seed: int) -> None:
    faults = [
        _fault("peer", is_echo=True, at_s=1.0),
        _fault("cause", is_echo=False, at_s=2.0),
        _fault("later", is_echo=False, at_s=3.0),
        _fault("other peer", is_echo=True, at_s=0.5),
    ]
    for turn in range(10):
        random.Random(seed + turn).shuffle(faults)
        assert str(culprit(faults).error) == "cause"
    echoes = [fault for fault in faults if fault.is_echo]
    assert str(culprit(echoes).error) == "other peer"


def test_an_error_that_only_passes_on_a_broken_connection_is_an_echo() -> None:
    broken = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1234")
    named = WorkerDied("a rank went away during the transfer")
    named.__cause__ = broken
    assert describe(broken).is_echo and describe(named).is_echo
    assert not describe(WorkerDied("a rank went away")).is_echo
    assert not describe(RuntimeError("shapes differ")).is_echo
    assert not describe(KeyError("Connection closed by peer")).is_echo


def test_an_error_raised_while_one_of_another_rank_is_handled_is_an_echo_too() -> None:
    try:
        try:
            raise RuntimeError("Connection reset by peer")
        finally:
            raise UsageError("abort of row 3: not in flight")
    except UsageError as error:
        assert describe(error).is_echo
        error.__context__.__context__ = error  # type: ignore[union-attr]
        assert describe(error).is_echo


def test_a_rank_that_could_have_gone_on_is_no_cause() -> None:
    assert describe(OtherRankRefused("the update did not start")).is_echo
    assert not describe(PlanError("the update did not start")).is_echo


def _dump(*frames: str) -> str:
    reader = 'Thread 0x1 (most recent call first):\n  File "x.py", line 1 in _read'
    calls = "\n".join(
        f'  File "{frame}' for frame in (*frames, 'worker.py", line 9 in worker_main')
    )
    return f"{reader}\n\nCurrent thread 0x2 (most recent call first):\n{calls}"


def test_of_silent_ranks_the_stopped_are_to_blame_then_the_busy_then_all() -> None:
    waiting = _dump('torch/distributed/distributed_c10d.py", line 5 in all_reduce')
    busy = _dump('model.py", line 7 in forward')

    def blamed(*stacks: str) -> str:
        return blame(dict(enumerate(stacks)), name="r{}".format)

    assert blamed(waiting, busy, waiting) == "r1 (held up by that: r0, r2)"
    assert blamed(waiting, STOPPED) == "r1, stopped by a signal (held up by that: r0)"
    assert blamed(busy, STOPPED) == "r1, stopped by a signal"
    assert blamed(waiting, waiting) == "r0, r1"
    assert blamed(busy, busy) == "r0, r1"


def test_a_weight_sync_gives_up_no_earlier_than_other_collectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roles, "WeightSync", lambda *_, timeout_s, **__: timeout_s)
    context = SimpleNamespace(objects={}, group=lambda role: None, collective_timeout_s=38.0)
    config = TrainConfig(workers=WorkersConfig(timeout_s=8.0))
    assert roles.build_sync(context, config, None) == 38.0  # type: ignore[arg-type, comparison-overlap]


def test_an_error_that_cannot_travel_is_told_as_text() -> None:
    error = PlanError("bad plan")
    error.socket = socket.socket  # type: ignore[attr-defined]
    assert isinstance(describe(error).error, PlanError)
    error.lock = lambda: None  # type: ignore[attr-defined]
    failure = describe(error)
    assert failure.error is None and failure.summary == "PlanError: bad plan"


def test_sum_adds_numbers_tensors_and_dicts_and_refuses_other_keys() -> None:
    parts = [{"loss": 1.5, "t": torch.ones(2)}, {"loss": 0.5, "t": torch.ones(2) * 2}]
    total = COLLECTORS["sum"](parts)
    assert total["loss"] == 2.0 and total["t"].tolist() == [3.0, 3.0]
    assert parts[0]["t"].tolist() == [1.0, 1.0]
    with pytest.raises(WorkerError, match=r"keys \['a'\] and \['b'\] differ"):
        COLLECTORS["sum"]([{"a": 1}, {"b": 1}])


def test_same_looks_inside_containers_and_tensors() -> None:
    value = {"a": [1, torch.arange(3)], "b": (2.0,)}
    assert COLLECTORS["same"]([value, {"a": [1, torch.arange(3)], "b": (2.0,)}]) is value
    for other in (
        {"a": [1, torch.arange(4)], "b": (2.0,)},
        {"a": [1, torch.arange(3)], "b": (2.5,)},
    ):
        with pytest.raises(WorkerError, match="ranks must agree"):
            COLLECTORS["same"]([value, other])


def test_placement_puts_the_engine_behind_the_trainer_or_on_it() -> None:
    apart = Placement.of(trainers=2, engines=3, colocate=False)
    assert apart.roles() == {"trainer": (0, 1), "engine": (2, 3, 4)}
    assert apart.world_size == 5
    together = Placement.of(trainers=2, engines=3, colocate=True)
    assert together.roles() == {"trainer": (0, 1), "engine": (0, 1, 2)}
    assert together.world_size == 3
    with pytest.raises(UsageError, match="0 trainer ranks and 1 engine ranks"):
        Placement.of(trainers=0, engines=1, colocate=False)
