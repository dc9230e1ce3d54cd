"""A proof: `verify` alone makes one, and what is proved cannot be changed."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

from shardloop.errors import PlanError
from shardloop.layout.tables import Table
from shardloop.reshard.inprocess import execute_inprocess
from shardloop.reshard.verify import Proof, verify
from tests.layout.reference import labels
from tests.reshard.broken import (
    ROUTES,
    make,
    with_join,
    with_pairs,
)
from tests.reshard.simulate import (
    assert_same,
    empty_tensors,
    expected_tensors,
    source_tensors,
)


def test_a_proof_comes_from_verify_alone() -> None:
    plan = make(ROUTES[0])
    with pytest.raises(TypeError, match="call verify"):
        Proof(object(), plan)
    with pytest.raises(TypeError, match="takes a Proof, got Plan"):
        execute_inprocess(plan, {}, {})  # type: ignore[arg-type]
    proof = verify(plan)
    assert proof.digest == proof.plan.digest == plan.digest
    with pytest.raises(TypeError, match="no subclasses"):
        type("Forged", (Proof,), {"__init__": lambda self: None})
    assert "writes every element of engine:tp=4 once" in str(proof)


def test_what_is_proved_cannot_be_changed() -> None:
    plan = make(ROUTES[0])
    step = plan.flows[0].joins[1]
    unfrozen = with_join(
        plan, 0, 1, replace(step, lo=step.lo.copy(), dst=moved_by_nothing(step.dst))
    )
    proof = verify(unfrozen)
    for name, value in (("plan", plan), ("digest", ""), ("num_boxes", 0), ("other", 1)):
        with pytest.raises(AttributeError, match="cannot be changed"):
            setattr(proof, name, value)
    with pytest.raises(AttributeError, match="cannot be changed"):
        del proof.plan
    assert proof.plan.digest == unfrozen.digest
    proved = proof.plan.flows[0].joins[1]
    for column in (proved.lo, proved.dst.loc):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 7


def test_nothing_that_was_kept_of_a_plan_changes_its_proof() -> None:
    """Views of its arrays, and what was derived before the arrays were mended."""
    plan = pickle.loads(pickle.dumps(make(ROUTES[0])))
    step = plan.flows[0].joins[2]
    step = replace(step, **{name: getattr(step, name).copy() for name in ("lo", "holder_row")})
    table = replace(step.dst, loc=step.dst.loc.copy())
    plan = with_join(plan, 0, 2, replace(step, dst=table))
    right = plan.flows[0].joins[2].holder_row.copy()
    step.holder_row[:] = np.roll(right, 1)
    assert plan.flows[0].holders.members[2].part[0] != step.src.part[right[0]]
    step.holder_row[:] = right
    kept = [step.lo[:], step.holder_row[:], table.loc[:]]
    proof = verify(plan)
    for view in kept:
        view[:] = 0
    full, dst = labels(plan.src.model), empty_tensors(plan)
    execute_inprocess(proof, source_tensors(plan, full), dst)
    assert_same(dst, expected_tensors(plan, full))


def test_what_is_derived_from_a_plan_is_read_only() -> None:
    proof = verify(make(ROUTES[2]))
    strips = proof.plan.src.tensors[0].cuts[2].strips
    step = proof.plan.flows[0].joins[2]
    members = [
        getattr(m, name)
        for m in (step.holders, step.consumers)
        for name in ("start", "part", "count", "group", "_key", "_by_part", "_sorted_part")
    ]
    columns = [strips.size, strips.start, strips.loc, strips.length, step.cell_atom]
    for column in (*members, *columns):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 7


def moved_by_nothing(table: Table) -> Table:
    return replace(table, loc=table.loc.copy())


def test_a_copied_or_unpickled_proof_is_verified_again() -> None:
    plan = make(ROUTES[1])
    proof = verify(plan)
    for again in (pickle.loads(pickle.dumps(proof)), copy.deepcopy(proof)):
        assert again.digest == proof.digest
        full, dst = labels(plan.src.model), empty_tensors(plan)
        execute_inprocess(again, source_tensors(plan, full), dst)
        assert_same(dst, expected_tensors(plan, full))
    broken = with_join(plan, 0, 2, with_pairs(plan.flows[0].joins[2], [0]))
    object.__setattr__(proof, "plan", broken)  # as in a pickle that was tampered with
    with pytest.raises(PlanError):
        pickle.loads(pickle.dumps(proof))


def test_numbers_of_a_plan_cannot_be_changed_in_place() -> None:
    step = make(ROUTES[0]).flows[0].joins[1]
    with pytest.raises(ValueError, match="read-only"):
        step.lo[0] = 7
    with pytest.raises(ValueError, match="read-only"):
        step.dst.loc[0] = 7
    assert isinstance(step.lo, np.ndarray)
