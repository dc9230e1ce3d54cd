"""Where an object lives: the ranks, roles and process groups around it. Floor 3.

Made by `parallel.worker`; handed to every factory and every function that runs on a rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardloop.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class RankContext:
    rank: int
    """Global rank."""
    world_size: int
    device: torch.device
    roles: Mapping[str, tuple[int, ...]]
    """Global ranks of each role, in the order of the role's own ranks."""
    groups: Mapping[str, Any]
    collective_timeout_s: float
    """When to give up on other ranks: later than the driver, who can name a hang."""
    objects: dict[str, Any] = field(default_factory=dict)
    """What was built on this rank earlier, by key."""

    def has(self, role: str) -> bool:
        """Whether this rank is in a role.

        Raises:
            UsageError: there is no such role.
        """
        if role not in self.roles:
            raise UsageError(f"role={role!r} is unknown; choose from {', '.join(self.roles)}")
        return self.rank in self.roles[role]

    def group(self, role: str) -> dist.ProcessGroup:
        """The process group of a role that this rank is in."""
        assert self.has(role), f"rank {self.rank} is not in role {role!r}"
        return self.groups[role]

    def role_rank(self, role: str) -> int:
        """Place of this rank within a role that it is in."""
        assert self.has(role), f"rank {self.rank} is not in role {role!r}"
        return self.roles[role].index(self.rank)
