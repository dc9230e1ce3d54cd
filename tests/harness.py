"""Runs a function on several real ranks, each a process with gloo."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardloop.config import WorkersConfig
from shardloop.controller.groups import LocalWorkers


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    roles: Mapping[str, Sequence[int]] | None = None,
) -> list[Any]:
    """`fn(context, *args)` on ranks 0..world_size-1; the results by rank.

    `fn` is a module-level function of a test module (`tests.<room>.test_x`), since the ranks import
    it by name. `roles` gives global ranks by role, which together are all ranks; by default there
    is one role, "all".
    """
    roles = {"all": range(world_size)} if roles is None else roles
    with LocalWorkers(roles, WorkersConfig(timeout_s=timeout_s)) as workers:
        assert len(workers.ranks) == world_size, (
            f"roles {dict(roles)} do not make {world_size} ranks"
        )
        results = dict(
            zip(
                workers.ranks_of(list(roles)), workers.run(fn, *args, role=list(roles)), strict=True
            )
        )
    return [results[rank] for rank in range(world_size)]
