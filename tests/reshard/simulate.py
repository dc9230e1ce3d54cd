"""Simulated ranks: tensors filled by the layouts' pieces, and plans carried out by hand."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from shardloop.families import CanonicalModel
from shardloop.layout import Layout, box_of, make_layout
from shardloop.reshard.inprocess import execute_inprocess
from shardloop.reshard.plan import Plan, plan_reshard
from shardloop.reshard.verify import verify
from tests.layout.reference import Arrays
from tests.reshard.handmade import random_layout, random_model


def planned(model: CanonicalModel, src: str, dst: str, **ranks: Any) -> Plan:
    return plan_reshard(make_layout(model, src), make_layout(model, dst), **ranks)


def random_plan(seed: int) -> Plan:
    """A plan between handmade layouts: on other ranks, the same ranks, or any overlap."""
    rng = Random(seed)
    model = random_model(rng)
    src, dst = random_layout(model, rng), random_layout(model, rng)
    if rng.random() < 0.3:
        return plan_reshard(src, dst)
    world = range(max(src.world_size, dst.world_size) + rng.choice([0, 0, 2]))
    src_ranks = rng.sample(world, src.world_size)
    dst_ranks = rng.sample(world, dst.world_size)
    return plan_reshard(src, dst, src_ranks=src_ranks, dst_ranks=dst_ranks)


def local_tensors(layout: Layout, rank: int, full: Arrays) -> Arrays:
    """What a rank must hold, piece by piece; padding is 0."""
    local = {name: np.zeros(shape, int) for name, shape in layout.local_shapes(rank).items()}
    for piece in layout.pieces(rank):
        piece.of(local)[...] = box_of(full[piece.name], piece.box)
    return local


def all_local(layout: Layout, ranks: Sequence[int], full: Arrays) -> dict[int, Arrays]:
    """By global rank."""
    return {g: local_tensors(layout, r, full) for r, g in enumerate(ranks)}


def source_tensors(plan: Plan, full: Arrays) -> dict[int, Arrays]:
    return all_local(plan.src, plan.src_ranks, full)


def expected_tensors(plan: Plan, full: Arrays) -> dict[int, Arrays]:
    return all_local(plan.dst, plan.dst_ranks, full)


def empty_tensors(plan: Plan, dtype: Any = int) -> dict[int, Arrays]:
    return {
        g: {name: np.zeros(shape, dtype) for name, shape in plan.dst.local_shapes(r).items()}
        for r, g in enumerate(plan.dst_ranks)
    }


def carried(plan: Plan, src: dict[int, Arrays]) -> dict[int, Arrays]:
    """The destination after all transfers; no element may be written twice, nor with padding."""
    dst = empty_tensors(plan)
    for rank in plan.dst_ranks:
        for transfer in plan.receives(rank):
            values = transfer.src.of(src[transfer.src_rank])
            place = transfer.dst.of(dst[rank])
            assert place.shape == values.shape == tuple(hi - lo for lo, hi in transfer.box)
            assert (values != 0).all(), f"{transfer} sends padding"
            assert (place == 0).all(), f"{transfer} writes elements that have been written"
            place[...] = values
    return dst


def resharded(plan: Plan, full: Arrays) -> dict[int, Arrays]:
    dst = empty_tensors(plan)
    execute_inprocess(verify(plan), source_tensors(plan, full), dst)
    return dst


def assert_same(actual: dict[int, Arrays], expected: dict[int, Arrays]) -> None:
    assert actual.keys() == expected.keys()
    for rank, tensors in expected.items():
        assert actual[rank].keys() == tensors.keys()
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(actual[rank][name], tensor, err_msg=f"{rank}: {name}")
