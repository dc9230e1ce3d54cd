"""Agreement before a transfer, and named errors for waits that fail. Floor 3.

Called by the executors and `shardloop.weight_sync`. A one-sided refusal would leave the other ranks
waiting for messages that never come. So every rank first reports whether it is ready; any fault
becomes an error on all ranks, before the first message.
"""

import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.errors import PlanError, ShardloopError, WorkerDied, WorkerTimeout


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
        PlanError: on the others, naming the ranks that refused, or saying that `same` differs.
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
        raise PlanError(f"{what} did not start: ranks {refused} refused; their own errors say why")
    if flags[-2] != -flags[-1]:
        raise PlanError(
            f"{what} did not start: the ranks disagree; this rank has {same}; "
            "pass equal values on all ranks"
        )


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
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        return WorkerTimeout(
            f"{what}: no answer within {timeout_s:g} s; a rank hangs or is slower than that: "
            "look at its log, or raise timeout_s, then start a new group"
        )
    return WorkerDied(f"{what}: the connection broke, a rank has died ({error}); start a new group")
