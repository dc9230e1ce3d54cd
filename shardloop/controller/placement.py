"""Which ranks train and which sample. Called by `controller.setup`. Floor 4."""

from dataclasses import dataclass

from shardloop.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Global ranks of both roles; whether they overlap changes nothing else in a run."""

    trainer_ranks: tuple[int, ...]
    engine_ranks: tuple[int, ...]

    @classmethod
    def of(cls, *, trainers: int, engines: int, colocate: bool) -> "Placement":
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
        )

    @property
    def world_size(self) -> int:
        return max(*self.trainer_ranks, *self.engine_ranks) + 1

    def roles(self) -> dict[str, tuple[int, ...]]:
        """As `LocalWorkers` takes them."""
        return {"trainer": self.trainer_ranks, "engine": self.engine_ranks}
