"""The proof: every kind of broken plan is refused, and there is no other way to a Proof."""

import copy
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from shardloop.errors import PlanError
from shardloop.layout import Layout
from shardloop.layout.strips import take
from shardloop.layout.tables import Table
from shardloop.reshard.inprocess import execute_inprocess
from shardloop.reshard.join import Join
from shardloop.reshard.plan import Plan
from shardloop.reshard.verify import Proof, verify
from tests.layout.reference import labels, tiny_model
from tests.reshard.simulate import (
    assert_same,
    empty_tensors,
    expected_tensors,
    planned,
    source_tensors,
)

PAIR_COLUMNS = ("atom", "row", "lo", "hi", "cell", "turn", "mult")
ROUTES = [
    ("fsdp=3", "engine:tp=4"),
    ("dp=2,fsdp=2", "engine:replicas=2,tp=2"),
    ("tp=2,fsdp=2", "engine:tp=4"),
    ("engine:tp=4", "fsdp=2,tp=2"),
]


def make(route: tuple[str, str]) -> Plan:
    model = tiny_model("qwen3", num_attention_heads=8, num_key_value_heads=2, hidden_size=7)
    return planned(model, *route)


def with_join(plan: Plan, flow: int, dim: int, step: Join) -> Plan:
    old = plan.flows[flow]
    joins = (*old.joins[:dim], step, *old.joins[dim + 1 :])
    flows = (*plan.flows[:flow], replace(old, joins=joins), *plan.flows[flow + 1 :])
    return replace(plan, flows=flows)


def changed(array: Any, index: int, value: int) -> Any:
    copied = array.copy()
    copied[index] = value
    return copied


def with_pairs(step: Join, index: list[int]) -> Join:
    return replace(step, **{name: getattr(step, name)[index] for name in PAIR_COLUMNS})


def drop_pair(step: Join, rng: random.Random) -> Join | None:
    kept = list(range(len(step.lo)))
    kept.pop(rng.randrange(len(kept)))
    return with_pairs(step, kept)


def double_pair(step: Join, rng: random.Random) -> Join | None:
    pairs = list(range(len(step.lo)))
    return with_pairs(step, [*pairs, rng.choice(pairs)])


def shift_pair(step: Join, rng: random.Random) -> Join | None:
    i, by = rng.randrange(len(step.lo)), rng.choice([-1, 1])
    lo, hi = changed(step.lo, i, step.lo[i] + by), changed(step.hi, i, step.hi[i] + by)
    return replace(step, lo=lo, hi=hi)


def shorten_pair(step: Join, rng: random.Random) -> Join | None:
    i = rng.randrange(len(step.lo))
    if rng.random() < 0.5:
        return replace(step, lo=changed(step.lo, i, step.lo[i] + 1))
    return replace(step, hi=changed(step.hi, i, step.hi[i] - 1))


def swap_atoms(step: Join, rng: random.Random) -> Join | None:
    i, j = rng.randrange(len(step.lo)), rng.randrange(len(step.lo))
    if step.atom[i] == step.atom[j]:
        return None
    return replace(step, atom=changed(changed(step.atom, i, step.atom[j]), j, step.atom[i]))


def swap_rows(step: Join, rng: random.Random) -> Join | None:
    i, j = rng.randrange(len(step.lo)), rng.randrange(len(step.lo))
    if step.row[i] == step.row[j] or step.cell[i] == step.cell[j]:
        return None
    return replace(step, row=changed(changed(step.row, i, step.row[j]), j, step.row[i]))


def wrong_holder(step: Join, rng: random.Random) -> Join | None:
    if len(step.src.lo) < 2:
        return None
    i = rng.randrange(len(step.holder_row))
    other = (step.holder_row[i] + rng.randrange(1, len(step.src.lo))) % len(step.src.lo)
    return replace(step, holder_row=changed(step.holder_row, i, other))


def moved(table: Table, rng: random.Random) -> Table:
    i = rng.randrange(len(table.loc))
    return replace(table, loc=changed(table.loc, i, table.loc[i] + rng.choice([-1, 1, 2])))


def wrong_loc_at_source(step: Join, rng: random.Random) -> Join | None:
    return replace(step, src=moved(step.src, rng))


def wrong_loc_at_destination(step: Join, rng: random.Random) -> Join | None:
    return replace(step, dst=moved(step.dst, rng))


def wrong_part(step: Join, rng: random.Random) -> Join | None:
    table = step.dst
    i = rng.randrange(len(table.part))
    return replace(step, dst=replace(table, part=changed(table.part, i, table.part[i] + 1)))


def wrong_turn(step: Join, rng: random.Random) -> Join | None:
    i = rng.randrange(len(step.turn))
    return replace(step, turn=changed(step.turn, i, step.turn[i] + 1))


MUTANTS: list[Callable[[Join, random.Random], Join | None]] = [
    drop_pair,
    double_pair,
    shift_pair,
    shorten_pair,
    swap_atoms,
    swap_rows,
    wrong_holder,
    wrong_loc_at_source,
    wrong_loc_at_destination,
    wrong_part,
    wrong_turn,
]


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
@pytest.mark.parametrize("route", ROUTES, ids=" to ".join)
def test_a_broken_join_is_refused(
    mutate: Callable[[Join, random.Random], Join | None], route: tuple[str, str], seed: int
) -> None:
    plan, rng = make(route), random.Random(f"{seed} {route}")
    num_broken = 0
    for flow in range(len(plan.flows)):
        for dim, step in enumerate(plan.flows[flow].joins):
            tried = (mutate(step, rng) for _ in range(12))
            for broken in islice((step for step in tried if step is not None), 2):
                num_broken += 1
                with pytest.raises(PlanError, match="faults"):
                    verify(with_join(plan, flow, dim, broken))
    assert num_broken >= 10


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("route", ROUTES, ids=" to ".join)
def test_a_wrong_stride_of_a_mesh_is_refused(side: str, route: tuple[str, str]) -> None:
    plan = make(route)
    layout: Layout = getattr(plan, side)
    for index, axis in enumerate(layout.mesh):
        for stride in (axis.stride * 2, axis.stride + 1):
            wrong = axis._replace(stride=stride)
            mesh = (*layout.mesh[:index], wrong, *layout.mesh[index + 1 :])
            with pytest.raises(PlanError, match=f"axis {axis.name} .* stride"):
                verify(replace(plan, **{side: replace(layout, mesh=mesh)}))


def test_exchanged_axes_of_a_mesh_are_refused() -> None:
    plan = make(("fsdp=2,tp=2", "engine:tp=2"))
    outer, inner = plan.src.mesh
    mesh = (outer._replace(stride=inner.stride), inner._replace(stride=outer.stride))
    with pytest.raises(PlanError, match="its stride must be"):
        verify(replace(plan, src=replace(plan.src, mesh=mesh)))


def test_a_missing_and_a_doubled_flow_are_refused() -> None:
    plan = make(ROUTES[0])
    with pytest.raises(PlanError) as error:
        verify(replace(plan, flows=plan.flows[2:]))
    for flow in plan.flows[:2]:
        assert f"{flow.key} in {flow.dst.template}: 0 flows and 1 declared" in str(error.value)
    with pytest.raises(PlanError, match="2 flows and 1 declared"):
        verify(replace(plan, flows=(*plan.flows, plan.flows[0])))


def test_a_flow_from_a_tensor_of_another_class_is_refused() -> None:
    plan = make(ROUTES[0])
    keys = [flow.key for flow in plan.flows]
    k, v = keys.index("self_attn.k_proj.weight"), keys.index("self_attn.v_proj.weight")
    flows = list(plan.flows)
    flows[k] = replace(flows[k], src=flows[v].src)
    with pytest.raises(PlanError, match="of the source does not show it"):
        verify(replace(plan, flows=tuple(flows)))


def test_a_destination_that_leaves_out_elements_is_refused() -> None:
    """A layout whose last rows became padding: its own plan is sound, but it is no whole model."""
    plan = make(("fsdp=2", "fsdp=2"))
    tensor = plan.dst.tensors[0]
    cut = tensor.cuts[1]
    short = replace(cut, strips=(take(cut.strips[0], 0, 1), *cut.strips[1:]))
    shorter = replace(tensor, cuts=(tensor.cuts[0], short, *tensor.cuts[2:]))
    layout = replace(plan.dst, tensors=(shorter, *plan.dst.tensors[1:]))
    flows = (replace(plan.flows[0], dst=shorter), *plan.flows[1:])
    with pytest.raises(PlanError, match="no rank of the destination holds 1:5"):
        verify(replace(plan, dst=layout, flows=flows))


def test_all_faults_are_listed() -> None:
    plan = make(ROUTES[0])
    broken = plan
    for flow in (0, 3):
        broken = with_join(broken, flow, 1, with_pairs(plan.flows[flow].joins[1], [0]))
    with pytest.raises(PlanError) as error:
        verify(broken)
    for flow in (0, 3):
        assert f"{plan.flows[flow].key}, dim 0: part" in str(error.value)


def test_wrong_ranks_are_refused() -> None:
    plan = make(("fsdp=2", "engine:tp=2"))
    for ranks in ((0, 0), (0,), (0, 1, 2), (-1, 0)):
        with pytest.raises(PlanError, match="are not 2 different ranks"):
            verify(replace(plan, src_ranks=ranks))


def test_a_proof_comes_from_verify_alone() -> None:
    plan = make(ROUTES[0])
    with pytest.raises(TypeError, match="call verify"):
        Proof(object(), plan, 0, 0)
    with pytest.raises(TypeError, match="takes a Proof, got Plan"):
        execute_inprocess(plan, {}, {})  # type: ignore[arg-type]
    proof = verify(plan)
    assert proof.plan is plan and proof.digest == plan.digest
    assert "writes every element of engine:tp=4 once" in str(proof)


def test_what_is_proved_cannot_be_changed() -> None:
    plan = make(ROUTES[0])
    step = plan.flows[0].joins[1]
    unfrozen = with_join(
        plan, 0, 1, replace(step, lo=step.lo.copy(), dst=moved_by_nothing(step.dst))
    )
    proof = verify(unfrozen)
    for name, value in (("plan", plan), ("digest", ""), ("num_pairs", 0), ("other", 1)):
        with pytest.raises(AttributeError, match="cannot be changed"):
            setattr(proof, name, value)
    with pytest.raises(AttributeError, match="cannot be changed"):
        del proof.plan
    assert proof.plan is unfrozen
    proved = proof.plan.flows[0].joins[1]
    for column in (proved.lo, proved.dst.loc):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 7
    for pairs in (proved.pairs, *proved.pairs_to.values(), *proved.pairs_from.values()):
        assert isinstance(pairs, tuple)


def moved_by_nothing(table: Table) -> Table:
    return replace(table, loc=table.loc.copy())


def with_template(plan: Plan, side: str, index: int, template: str) -> Plan:
    """The plan with one tensor of a side renamed, in its flows as well."""
    layout: Layout = getattr(plan, side)
    old = layout.tensors[index]
    new = replace(old, template=template)
    tensors = (*layout.tensors[:index], new, *layout.tensors[index + 1 :])
    flows = tuple(
        replace(flow, **{side: new}) if getattr(flow, side) is old else flow for flow in plan.flows
    )
    return replace(plan, **{side: replace(layout, tensors=tensors)}, flows=flows)


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("many_layers", [True, False])
def test_equal_names_on_a_rank_are_refused(side: str, many_layers: bool) -> None:
    """Two layers of one tensor, or two tensors of which one has its layer written out."""
    plan = make(ROUTES[0])
    templates = [tensor.template for tensor in getattr(plan, side).tensors]
    norm = next(t for t in templates if "input_layernorm" in t)
    renamed = norm if many_layers else "model.norm.weight"
    name = norm.format(layer=1)
    what = {"src": "source", "dst": "destination"}[side]
    broken = with_template(plan, side, templates.index(renamed), name)
    with pytest.raises(PlanError, match=f"{name}: 2 layers or tensors of the {what} share"):
        verify(broken)


def test_a_copied_or_unpickled_proof_is_verified_again() -> None:
    plan = make(ROUTES[1])
    proof = verify(plan)
    for again in (pickle.loads(pickle.dumps(proof)), copy.deepcopy(proof)):
        assert again.digest == proof.digest
        full, dst = labels(plan.src.model), empty_tensors(plan)
        execute_inprocess(again, source_tensors(plan, full), dst)
        assert_same(dst, expected_tensors(plan, full))
    broken = with_join(plan, 0, 1, with_pairs(plan.flows[0].joins[1], [0]))
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
