"""The mesh of a trainer: its groups come about whatever else its ranks are in, and do not wait for
ever."""

import pytest
import torch
import torch.distributed as dist

from shardloop.parallel.context import RankContext
from shardloop.parallel.mesh import make_mesh
from tests.harness import run_ranks

LAYOUT = "dp=2,fsdp=1,tp=2"


def sums_along_axes(context: RankContext) -> dict[str, list[float]]:
    """The sum of the global ranks along each axis, of two meshes."""
    sums: dict[str, list[float]] = {"dp": [], "fsdp": [], "tp": []}
    for _ in range(2 if context.has("trainer") else 0):
        mesh = make_mesh(LAYOUT, group=context.group("trainer"), device_type="cpu", timeout_s=30)
        for axis, values in sums.items():
            value = torch.tensor(float(context.rank))
            dist.all_reduce(value, group=mesh.get_group(axis))
            values.append(value.item())
    return sums


@pytest.mark.parametrize(
    "others",
    [
        {"engine": (0, 1)},
        {"engine": (1, 2, 4), "engine/0": (1,), "engine/1": (2,), "engine/2": (4,)},
    ],
    ids=["one-engine", "replicas"],
)
def test_a_mesh_comes_about_whatever_other_roles_its_ranks_have(others) -> None:
    roles = {"trainer": (0, 1, 2, 3), **others}
    world_size = 1 + max(rank for ranks in roles.values() for rank in ranks)
    by_rank = run_ranks(sums_along_axes, world_size, roles=roles)
    along_dp, along_tp = {0: 2, 1: 4, 2: 2, 3: 4}, {0: 1, 1: 1, 2: 5, 3: 5}
    for rank in roles["trainer"]:
        assert by_rank[rank] == {
            "dp": [along_dp[rank]] * 2,
            "fsdp": [rank] * 2,
            "tp": [along_tp[rank]] * 2,
        }


def wait_for_a_rank_that_does_not_come(context: RankContext) -> str:
    mesh = make_mesh("fsdp=2,tp=2", group=context.group("all"), device_type="cpu", timeout_s=1)
    message = ""
    if context.rank == 0:
        try:
            dist.all_reduce(torch.zeros(1), group=mesh.get_group("tp"))
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    return message


def test_a_rank_waits_along_an_axis_no_longer_than_it_was_told() -> None:
    assert "1000ms" in run_ranks(wait_for_a_rank_that_does_not_come, 4)[0]
