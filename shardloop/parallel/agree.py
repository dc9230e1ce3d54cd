"""Ranks that go on together or fail together, and named errors for waits that fail. Floor 3.

Called by the executors, `shardloop.weight_sync`, `shardloop.checkpoint` and the trainer. A rank
that gives up alone would leave the others waiting for messages that never come. So every rank
reports whether it can go on (`agree`), or whether it could (`together`); any fault becomes an error
on all ranks.
"""

import zlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from shardloop.errors import (
    CheckpointError,
    PlanError,
    ShardloopError,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)

T = TypeVar("T")

_TIMED_OUT = ("timed out", "timeout")
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout caused pair closure",
    "connectFullMesh",
    "ncclRemoteError",
)
"""What gloo and NCCL say when another rank went away or did not come."""


class OtherRankRefused(PlanError):
    """This rank could have gone on; the error of another one says what is wrong."""


def agree(
    group: dist.ProcessGroup,
    *,
    fault: ShardloopError | None,
    same: str,
    what: str,
    timeout_s: float,
) -> None:
    """Collective over `group`: return on all ranks, or raise on all ranks.

    Args:
        fault: why this rank cannot go on, or None.
        same: a text that must be equal on all ranks: what both ends of a message depend on.
        what: what is about to happen, for the messages.
    Raises:
        ShardloopError: `fault` itself, on the ranks that have one.
        OtherRankRefused: on the others, naming the ranks that refused.
        PlanError: `same` differs.
        WorkerDied, WorkerTimeout: a rank did not take part.
    """
    ranks = dist.get_process_group_ranks(group)
    token = zlib.crc32(same.encode())
    flags = torch.zeros(len(ranks) + 2, dtype=torch.int64)
    flags[dist.get_rank(group)] = 0 if fault is None else 1
    flags[-2:] = torch.tensor([token, -token])
    flags = all_reduce(
        flags, group, op=dist.ReduceOp.MAX, what=f"agreement before {what}", timeout_s=timeout_s
    )
    if fault is not None:
        raise fault
    refused = [rank for rank, flag in zip(ranks, flags[:-2].tolist(), strict=True) if flag]
    if refused:
        raise OtherRankRefused(
            f"{what} did not start: ranks {refused} refused; their own errors say why"
        )
    if flags[-2] != -flags[-1]:
        raise PlanError(
            f"{what} did not start: the ranks disagree; this rank has {same}; "
            "pass equal values on all ranks"
        )


def act_together(
    group: dist.ProcessGroup, action: Callable[[], T], *, what: str, same: str, timeout_s: float
) -> T:
    """Collective over `group`: `action` on each rank; if it fails on any, fail on all at once.

    Args:
        what, same: as in `agree`.
    Raises:
        ShardloopError: what `action` raised on this rank; a WorkerError where that is none of ours.
        OtherRankRefused: on the others, naming each rank that failed and why.
        PlanError, WorkerDied, WorkerTimeout: as `agree`.
    """
    result, fault = None, None
    try:
        result = action()
    except ShardloopError as error:
        fault = error
    except Exception as error:
        fault = WorkerError(f"{what}: {type(error).__name__} on rank {dist.get_rank()}: {error}")
        fault.__cause__ = error
    try:
        agree(group, fault=fault, same=same, what=what, timeout_s=timeout_s)
    except ShardloopError as error:
        if error is not fault and not isinstance(error, OtherRankRefused):
            raise
        reasons = _reasons(group, fault, what=what, timeout_s=timeout_s)
        if error is fault:
            raise
        raise OtherRankRefused(f"{error}: {reasons}") from None
    return result  # type: ignore[return-value]


def _reasons(
    group: dist.ProcessGroup, fault: ShardloopError | None, *, what: str, timeout_s: float
) -> str:
    """Collective over `group`: which ranks have a fault, and each one's."""
    mine = None if fault is None else f"rank {dist.get_rank()}: {type(fault).__name__}: {fault}"
    reasons: list[str | None] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(reasons, mine, group=group)
    except RuntimeError as error:
        raise named_error(error, f"the reasons against {what}", timeout_s) from error
    return "; ".join(reason for reason in reasons if reason is not None)


def together(group: dist.ProcessGroup, action: Callable[[], T], *, path: Path) -> T:
    """Collective over `group`: run `action` on each rank; if it fails on any, fail on all.

    Whatever the failure, no rank is left waiting in a later collective for one that gave up.

    Raises:
        CheckpointError: on every rank, naming `path` and each distinct failure.
    """
    result, cause = None, None
    try:
        result = action()
    except (Exception, CheckpointException) as error:
        cause = error
    failures: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(failures, None if cause is None else _one_line(cause), group=group)
    reasons = dict.fromkeys(text for text in failures if text is not None)
    if reasons:
        raise CheckpointError(f"{path}: {'; '.join(reasons)}") from cause
    return result  # type: ignore[return-value]


def _one_line(error: BaseException) -> str:
    """One line; of a failure that torch gathered from several ranks, each cause once."""
    if isinstance(error, CheckpointException):
        causes = (f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values())
        return "; ".join(dict.fromkeys(causes))
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def all_reduce(
    values: Tensor,
    group: dist.ProcessGroup,
    *,
    what: str,
    timeout_s: float,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Tensor:
    """Collective over `group`: the reduced values, on the CPU.

    Raises:
        WorkerDied, WorkerTimeout: a rank did not take part; the message says in `what`.
    """
    values = values.to(wire_device(group))
    try:
        work = dist.all_reduce(values, op=op, group=group, async_op=True)
    except RuntimeError as error:
        raise named_error(error, what, timeout_s) from error
    assert work is not None, "this process is not a rank of the group"
    wait(work, what=what, timeout_s=timeout_s)
    return values.cpu()


def wait(work: dist.Work, *, what: str, timeout_s: float) -> None:
    """Wait for one operation of the communication library.

    Raises:
        WorkerTimeout: not done within `timeout_s` seconds.
        WorkerDied: the connection broke. The group cannot be used after either.
    """
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise named_error(error, what, timeout_s) from error


def wire_device(group: dist.ProcessGroup) -> torch.device:
    """Where buffers must live for this group: NCCL reads GPU memory, gloo reads CPU memory."""
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def named_error(error: RuntimeError, what: str, timeout_s: float) -> ShardloopError:
    """What a failed wait means: WorkerTimeout or WorkerDied, saying `what` was waited for."""
    if any(phrase in str(error).lower() for phrase in _TIMED_OUT):
        return WorkerTimeout(
            f"{what}: no answer within {timeout_s:g} s; a rank hangs or is slower than that: "
            "look at its log, or raise workers.timeout-s, then start a new group"
        )
    return WorkerDied(f"{what}: the connection broke, a rank has died ({error}); start a new group")


def tells_of_another_rank(error: BaseException) -> bool:
    """True of an error that says nothing of this rank: another one refused, left or is late."""
    if isinstance(error, OtherRankRefused):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _LOST_PEER)
