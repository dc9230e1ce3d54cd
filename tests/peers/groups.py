"""Process groups that move nothing, so that one process can be each rank of any world in turn."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def idle_groups(rank: int, world_size: int) -> Iterator[None]:
    """Sizes and ranks are true within; no collective call does anything."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=world_size
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
