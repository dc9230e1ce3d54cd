"""Simulated ranks: source tensors by plain indexing, destinations of zeros, one plan between."""

from typing import Any

import numpy as np

from shardloop.families import CanonicalModel
from shardloop.layout import make_layout
from shardloop.reshard.inprocess import execute_inprocess
from shardloop.reshard.plan import Plan, plan_reshard
from shardloop.reshard.verify import verify
from tests.layout.reference import Arrays, expected_local


def planned(model: CanonicalModel, src: str, dst: str, **ranks: Any) -> Plan:
    return plan_reshard(make_layout(model, src), make_layout(model, dst), **ranks)


def source_tensors(plan: Plan, full: Arrays) -> dict[int, Arrays]:
    model, spec = plan.src.model, plan.src.spec
    return {g: expected_local(model, spec, r, full) for r, g in enumerate(plan.src_ranks)}


def expected_tensors(plan: Plan, full: Arrays) -> dict[int, Arrays]:
    model, spec = plan.dst.model, plan.dst.spec
    return {g: expected_local(model, spec, r, full) for r, g in enumerate(plan.dst_ranks)}


def empty_tensors(plan: Plan, dtype: Any = int) -> dict[int, Arrays]:
    return {
        g: {name: np.zeros(shape, dtype) for name, shape in plan.dst.local_shapes(r).items()}
        for r, g in enumerate(plan.dst_ranks)
    }


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
