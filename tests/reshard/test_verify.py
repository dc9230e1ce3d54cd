"""The proof of plans: every kind of broken plan is refused, and what is proved is right."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from shardloop.errors import PlanError
from shardloop.layout import Layout
from shardloop.reshard.join import Join
from shardloop.reshard.verify import verify
from tests.layout.reference import labels, tiny_model
from tests.reshard.broken import (
    ROUTES,
    WAYS,
    any_number_changed,
    every_model,
    make,
    random_plans,
    with_join,
    with_pairs,
)
from tests.reshard.simulate import (
    assert_same,
    carried,
    expected_tensors,
    planned,
    random_plan,
    source_tensors,
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_broken_join_is_refused(
    way: Callable[[Join, random.Random], Join | None], seed: int
) -> None:
    rng = random.Random(f"{seed} {way.__name__}")
    num_broken = 0
    for plan in random_plans(rng, 8):
        flows = rng.sample(range(len(plan.flows)), k=4)
        for flow, index in ((f, i) for f in flows for i in range(len(plan.flows[f].joins))):
            tried = (way(plan.flows[flow].joins[index], rng) for _ in range(8))
            for broken in islice((step for step in tried if step is not None), 1):
                num_broken += 1
                with pytest.raises(PlanError, match="faults"):
                    verify(with_join(plan, flow, index, broken))
    assert num_broken >= 10


def test_plans_of_all_layouts_are_proved(seed: int) -> None:
    for plan in random_plans(random.Random(seed), 40):
        assert verify(plan).num_classes == len(plan.dst.model.classes)


def test_a_plan_that_is_proved_is_right_whatever_was_changed(seed: int) -> None:
    """Any number, in any column: where the proof sees no fault, there must be none."""
    rng = random.Random(seed)
    num_refused = 0
    for plan in (random_plan(seed * 100 + i) for i in range(4)):
        for _ in range(8):
            flow = rng.randrange(len(plan.flows))
            index = rng.randrange(len(plan.flows[flow].joins))
            broken = any_number_changed(plan.flows[flow].joins[index], rng)
            try:
                proved = verify(with_join(plan, flow, index, broken)).plan
            except PlanError:
                num_refused += 1
                continue
            full = labels(plan.src.model)
            assert_same(carried(proved, source_tensors(plan, full)), expected_tensors(plan, full))
            sent, received = (
                sorted(repr(transfer) for rank in proved.ranks for transfer in list_of(rank))
                for list_of in (proved.sends, proved.receives)
            )
            assert sent == received
    assert num_refused >= 3


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


def test_a_dtype_that_differs_between_the_sides_is_refused() -> None:
    plan = make(ROUTES[0])
    model = plan.dst.model
    classes = (replace(model.classes[0], dtype="float32"), *model.classes[1:])
    other = replace(plan.dst, model=replace(model, classes=classes))
    with pytest.raises(PlanError, match=f"{classes[0].key}: in the destination.*dtype float32"):
        verify(replace(plan, dst=other))


def test_all_faults_are_listed_but_many_of_a_kind_are_counted() -> None:
    plan = make(ROUTES[0])
    broken = plan
    for flow in (0, 3):
        broken = with_join(broken, flow, 2, with_pairs(plan.flows[flow].joins[2], [0]))
    with pytest.raises(PlanError) as error:
        verify(broken)
    for flow in (0, 3):
        assert f"{plan.flows[flow].key}: dim 0: tp=1 gets" in str(error.value)
    big = planned(tiny_model(vocab_size=64), "fsdp=64", "fsdp=64")
    step = big.flows[0].joins[2]
    with pytest.raises(PlanError, match="and 58 more rows") as error:
        verify(with_join(big, 0, 2, replace(step, hi=step.hi - 1)))
    assert len(str(error.value).splitlines()) < 20


def test_a_fault_says_who_gets_what_and_how_often() -> None:
    plan = make(("fsdp=2", "engine:tp=2"))
    step = plan.flows[0].joins[2]
    lo = step.lo.copy()
    lo[1] += 1
    with pytest.raises(PlanError, match=r"embed_tokens.weight: dim 0: tp=1 gets 5:6 never"):
        verify(with_join(plan, 0, 2, replace(step, lo=lo)))
    lo = lo - np.array([[0], [2]])
    with pytest.raises(PlanError, match=r"tp=1 gets 4:5 once, which is not in its row"):
        verify(with_join(plan, 0, 2, replace(step, lo=lo)))


def test_wrong_ranks_are_refused() -> None:
    plan = make(("fsdp=2", "engine:tp=2"))
    for ranks in ((0, 0), (0,), (0, 1, 2), (-1, 0)):
        with pytest.raises(PlanError, match="are not 2 different ranks"):
            verify(replace(plan, src_ranks=ranks))
    with pytest.raises(PlanError, match=r"lost ranks \[7\] are none of the source ranks"):
        verify(replace(plan, lost=(7,)))


@pytest.mark.parametrize("spec", ["dp=2,fsdp=2", "pp=2,dp=2", "zero3=2,dp=2", "engine:tp=4"])
def test_what_only_lost_ranks_held_is_named_and_nothing_else(spec: str) -> None:
    """Against all pieces of all ranks that are left."""
    for model in every_model()[:2]:
        plan = planned(model, spec, "engine:tp=2")
        held = [pieces_of(plan.src, rank) for rank in range(4)]
        for number in range(1, 2**4):
            lost = tuple(rank for rank in range(4) if number & 1 << rank)
            left = set().union(*(held[rank] for rank in range(4) if rank not in lost))
            dead = {name for name, _ in set().union(*held) - left}
            broken = {key for key in plan.src.model.class_of if any(key in name for name in dead)}
            if not dead:
                verify(replace(plan, lost=lost))
                continue
            with pytest.raises(PlanError) as error:
                verify(replace(plan, lost=lost))
            lines = [line for line in str(error.value).splitlines() if "only lost ranks" in line]
            named = {key for key in plan.src.model.class_of if any(key in line for line in lines)}
            assert named or not broken
            assert named <= broken


def pieces_of(layout: Layout, rank: int) -> set[tuple[str, int]]:
    """Every element that a rank holds."""
    full = labels(layout.model)
    return {
        (piece.name, number)
        for piece in layout.pieces(rank)
        for number in full[piece.name][tuple(slice(*run) for run in piece.box)].ravel().tolist()
    }


@pytest.mark.parametrize("dtype", [float, np.int32, np.uint64])
@pytest.mark.parametrize("name", ["lo", "row", "holder_start", "cell"])
def test_columns_are_int64(name: str, dtype: type) -> None:
    """1.0 == 1 to every comparison of the proof, but no slice takes it."""
    plan = make(ROUTES[0])
    step = plan.flows[0].joins[2]
    wrong = replace(step, **{name: getattr(step, name).astype(dtype)})
    with pytest.raises(PlanError, match=f"column {name} is {np.dtype(dtype)}"):
        verify(with_join(plan, 0, 2, wrong))


def test_every_atom_has_holders_of_its_own() -> None:
    """One list of holders for two atoms: numpy would read it for both."""
    plan = planned(tiny_model("qwen3"), "fsdp=1", "engine:tp=2")
    flow = next(i for i, f in enumerate(plan.flows) if len(f.joins[2].lo) == 2)
    step = plan.flows[flow].joins[2]
    two = replace(step, atom_lo=step.lo, atom_hi=step.hi, atom=np.arange(2))
    with pytest.raises(PlanError, match=r"holder_start is int64 \(2,\), it must be int64 \(3,\)"):
        verify(with_join(plan, flow, 2, two))


@pytest.mark.parametrize(
    ("lost", "fault"), [((2, 2), "each once"), ((3, 2), "in order"), ((5,), "in the destination")]
)
def test_lost_ranks_of_a_plan_are_in_order_and_no_destination(
    lost: tuple[int, ...], fault: str
) -> None:
    plan = planned(tiny_model(), "dp=4", "engine:replicas=2", lost=[2])
    with pytest.raises(PlanError, match=fault):
        verify(replace(plan, lost=lost))
