"""The engine of a run as one thing, whatever number of replicas it has. Floor 4.

Called by `controller.rollouts` to generate, by the loop and the stages of a run to bring it the
trainer's weights, and by the loop to put it to sleep.

    requests ──deal──▶ replica 0 ─┐
                  └──▶ replica 1 ─┴─▶ completions, in the order of the requests

A replica is a tensor-parallel group of ranks that holds the whole model. All replicas generate at
the same time, each its own requests. Since sampling noise is a function of the sample alone, who
draws a sample changes nothing about it.
"""

from collections.abc import Sequence
from typing import Any

from shardloop.controller.groups import WorkerGroup
from shardloop.engines.gate import SleepLevel
from shardloop.errors import WorkerError
from shardloop.types import Completion, Request
from shardloop.weight_sync import SyncReport


class Engines:
    """All replicas of an engine; takes weights, wakes and sleeps as one."""

    def __init__(self, group: WorkerGroup, *, num_replicas: int) -> None:
        """
        Args:
            group: all ranks of the engine, replica by replica.
        """
        self._group = group
        self._replicas = group.split(num_replicas)
        self._asleep: SleepLevel | None = None
        self._version: int | None = None
        self._moved: list[SyncReport] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion of each request, in their order.

        Raises:
            WorkerError: a replica gave fewer completions than it had requests. Else as
                `WorkerGroup.call`.
        """
        shares = deal(requests, num_shares=len(self._replicas))
        pending = [
            (share, replica.submit("generate", [requests[i] for i in share], collect="first"))
            for share, replica in zip(shares, self._replicas, strict=True)
            if share
        ]
        by_place: dict[int, Completion] = {}
        for share, answer in pending:
            completions = answer.result()
            if len(completions) != len(share):
                raise WorkerError(
                    f"the engine answered {len(share)} requests by {len(completions)} completions"
                )
            by_place |= dict(zip(share, completions, strict=True))
        return [by_place[place] for place in range(len(requests))]

    def take_weights(self, trainer: WorkerGroup, sync: WorkerGroup) -> int:
        """Wake, with the trainer's present weights: moved only where they are others than these.

        Args:
            trainer: always the same, whose version is another whenever its weights are.
            sync: a `WeightSync` from that trainer to this engine, on all ranks of both.
        Returns:
            Their version.
        """
        self.wake()
        version: int = trainer.call("version", collect="same")
        if version != self._version:
            self._version = None
            self._moved.append(sync.call("sync", version, collect="first"))
            self._version = version
        return version

    def traffic(self) -> dict[str, Any]:
        """Metrics: what moving weights cost since this was last asked."""
        moved, self._moved = self._moved, []
        metrics: dict[str, Any] = {"wire_bytes": sum(report.wire_bytes for report in moved)}
        if moved and moved[-1].density is not None:
            metrics["wire_density"] = moved[-1].density
        return metrics

    def sleep(self, level: SleepLevel) -> None:
        """Free the cache, or also the weights: these must be synced again before the next use."""
        self._group.call("sleep", level)
        self._asleep = level
        if level == "weights":
            self._version = None

    def wake(self) -> None:
        """Take back what `sleep` gave up; nothing where it is awake."""
        if self._asleep is not None:
            self._group.call("wake")
            self._asleep = None


def deal(requests: Sequence[Request], *, num_shares: int) -> list[list[int]]:
    """Places in `requests` for each replica, ascending: requests of one prompt go together.

    The prompt is then prefilled once. Largest prompts first, each to the replica with the fewest
    tokens to come so far: no replica has more than its fair share by more than one prompt's. Equal
    requests are dealt equally.
    """
    prompts: dict[tuple[int, ...], list[int]] = {}
    for place, request in enumerate(requests):
        prompts.setdefault(request.prompt_ids, []).append(place)

    def num_tokens(prompt_ids: tuple[int, ...]) -> int:
        return len(prompt_ids) + sum(requests[i].sampling.max_tokens for i in prompts[prompt_ids])

    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [0] * num_shares
    for prompt_ids in sorted(prompts, key=num_tokens, reverse=True):
        least = loads.index(min(loads))
        shares[least] += prompts[prompt_ids]
        loads[least] += num_tokens(prompt_ids)
    return [sorted(share) for share in shares]
