"""Laws of resharding, over random models, layouts and placements of ranks."""

from collections import defaultdict
from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardloop.layout import box_of, make_layout
from shardloop.reshard.inprocess import execute_inprocess
from shardloop.reshard.plan import Plan, plan_reshard
from shardloop.reshard.verify import verify
from tests.layout.reference import labels, models, specs
from tests.reshard.simulate import (
    assert_same,
    empty_tensors,
    expected_tensors,
    source_tensors,
)

random_plans = settings(deadline=None, max_examples=40)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Disjoint ranks, the same ranks, or any overlap in any order."""
    model = draw(models())
    src, dst = (make_layout(model, draw(specs(model))) for _ in range(2))
    if draw(st.booleans()):
        return plan_reshard(src, dst)
    world = range(max(src.world_size, dst.world_size) + draw(st.integers(0, 2)))
    src_ranks = draw(st.permutations(world))[: src.world_size]
    dst_ranks = draw(st.permutations(world))[: dst.world_size]
    return plan_reshard(src, dst, src_ranks=src_ranks, dst_ranks=dst_ranks)


@random_plans
@given(plans())
def test_every_destination_element_arrives_exactly_once_from_the_right_one(plan: Plan) -> None:
    full = labels(plan.src.model)
    src, dst = source_tensors(plan, full), empty_tensors(plan)
    verify(plan)
    for rank in plan.dst_ranks:
        for transfer in plan.receives(rank):
            place = transfer.dst.of(dst[rank])
            assert place.shape == transfer.dst.shape == transfer.src.shape
            assert (place == 0).all(), f"{transfer} writes elements that have been written"
            place[...] = transfer.src.of(src[transfer.src_rank])
            box = box_of(full[transfer.name], transfer.box)
            np.testing.assert_array_equal(place, box)
    assert_same(dst, expected_tensors(plan, full))


@random_plans
@given(plans())
def test_sends_of_all_ranks_are_receives_of_all_ranks_in_the_same_order(plan: Plan) -> None:
    sent, received = defaultdict(list), defaultdict(list)
    for rank in plan.ranks:
        for transfer in plan.sends(rank):
            assert transfer.src_rank == rank
            sent[rank, transfer.dst_rank].append(transfer)
        for transfer in plan.receives(rank):
            assert transfer.dst_rank == rank
            received[transfer.src_rank, rank].append(transfer)
    assert sent == received


@random_plans
@given(plans())
def test_a_second_update_equals_a_fresh_one(plan: Plan) -> None:
    first = labels(plan.src.model)
    second = {name: tensor[::-1] + 1000 for name, tensor in first.items()}
    proof, dst = verify(plan), empty_tensors(plan)
    for full in (first, second):
        execute_inprocess(proof, source_tensors(plan, full), dst)
    assert_same(dst, expected_tensors(plan, second))


@random_plans
@given(plans())
def test_what_a_rank_holds_is_never_sent_to_it(plan: Plan) -> None:
    holds = defaultdict(set)
    for rank, tensors in source_tensors(plan, labels(plan.src.model)).items():
        holds[rank] = {int(x) for tensor in tensors.values() for x in tensor.ravel()}
    full = labels(plan.src.model)
    for rank in plan.dst_ranks:
        for transfer in plan.receives(rank):
            if transfer.src_rank != rank:
                box = box_of(full[transfer.name], transfer.box)
                assert not holds[rank] & {int(x) for x in box.ravel()}


@random_plans
@given(plans(), st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_tensors(plan: Plan, random: Random) -> None:
    classes = list(plan.src.model.classes)
    random.shuffle(classes)
    model = replace(plan.src.model, classes=tuple(classes))
    again = plan_reshard(
        make_layout(model, plan.src.spec),
        make_layout(model, plan.dst.spec),
        src_ranks=plan.src_ranks,
        dst_ranks=plan.dst_ranks,
    )
    assert again.digest == plan.digest
    for rank in plan.ranks:
        assert again.receives(rank) == plan.receives(rank)
        assert again.sends(rank) == plan.sends(rank)
