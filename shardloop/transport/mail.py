"""Messages between two ranks, posted together and waited for with names. Floor 3.

Called by `transport.delta`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from shardloop.parallel.agree import named_error, wait


class Message(NamedTuple):
    kind: Callable[..., dist.Work | None]
    """`dist.isend` or `dist.irecv`."""
    buffer: Tensor
    peer: int
    label: str


class Mail:
    """Messages of one group, and the longest wait for one."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group = group
        self.timeout_s = timeout_s

    def post(self, messages: Sequence[Message]) -> "Posted":
        labels = [f"{message.label}, rank {message.peer}" for message in messages]
        ops = [
            dist.P2POp(
                message.kind,
                message.buffer,
                group=self._group,
                group_peer=dist.get_group_rank(self._group, message.peer),
            )
            for message in messages
        ]
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise named_error(error, " and ".join(labels), self.timeout_s) from error
        if len(works) != len(labels):  # the library made one operation of the batch
            labels = [" and ".join(labels)] * len(works)
        return Posted(works, labels, messages, self.timeout_s)


class Posted(NamedTuple):
    """Messages on their way, and their memory."""

    works: Sequence[dist.Work]
    labels: Sequence[str]
    messages: Sequence[Message]
    timeout_s: float

    def wait(self) -> None:
        for work, label in zip(self.works, self.labels, strict=True):
            wait(work, what=label, timeout_s=self.timeout_s)
