"""Which ranks train and which sample, and in which roles. Floor 4.

Called by `controller.setup`, `controller.inference` and, on the ranks, `controller.roles`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardloop.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Global ranks of both roles; whether they overlap changes nothing else in a run."""

    trainer_ranks: tuple[int, ...]
    engine_ranks: tuple[int, ...]
    """Replica by replica."""
    num_replicas: int

    @classmethod
    def of(
        cls, *, trainers: int, engines: int, colocate: bool, num_replicas: int = 1
    ) -> "Placement":
        """Ranks from 0 up: the engine's after the trainer's, or the same ones when colocated.

        Raises:
            UsageError: a role without ranks.
        """
        if trainers < 1 or engines < 1:
            raise UsageError(
                f"{trainers} trainer ranks and {engines} engine ranks; each role needs 1 or more"
            )
        first = 0 if colocate else trainers
        return cls(
            trainer_ranks=tuple(range(trainers)),
            engine_ranks=tuple(range(first, first + engines)),
            num_replicas=num_replicas,
        )

    @property
    def world_size(self) -> int:
        return max(*self.trainer_ranks, *self.engine_ranks) + 1

    def roles(self) -> dict[str, tuple[int, ...]]:
        """As `LocalWorkers` takes them."""
        engines = engine_roles(self.engine_ranks, num_replicas=self.num_replicas)
        return {"trainer": self.trainer_ranks, **engines}


def engine_roles(ranks: Sequence[int], *, num_replicas: int) -> dict[str, tuple[int, ...]]:
    """The role "engine", and where it has several replicas one of its own for each of them.

    A replica's ranks lie side by side; its role gives it a process group.
    """
    roles = {"engine": tuple(ranks)}
    if num_replicas > 1:
        size = len(ranks) // num_replicas
        roles |= {
            replica_role(replica): tuple(ranks[replica * size : (replica + 1) * size])
            for replica in range(num_replicas)
        }
    return roles


def replica_role(replica: int) -> str:
    return f"engine/{replica}"
