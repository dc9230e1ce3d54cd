"""Cost: bytes are those of the transfers, the least possible is reached, and replicas share."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given

from shardloop.families import canonical_model
from shardloop.layout import make_layout
from shardloop.reshard.cost import cost
from shardloop.reshard.plan import Plan, plan_reshard
from tests.layout.reference import LARGE, labels, tiny_model
from tests.reshard.simulate import expected_tensors, planned, source_tensors
from tests.reshard.test_laws import plans, random_plans


@random_plans
@given(plans())
def test_cost_counts_the_transfers_of_all_ranks(plan: Plan) -> None:
    pairs: Counter[tuple[int, int]] = Counter()
    num_transfers = 0
    for rank in plan.dst_ranks:
        for transfer in plan.receives(rank):
            num_transfers += 1
            pair = transfer.src_rank, transfer.dst_rank
            pairs[pair] += 2 * int(np.prod(transfer.dst.shape))
    counted = cost(plan, itemsize=2)
    wire = {pair: size for pair, size in pairs.items() if pair[0] != pair[1]}
    assert counted.pair_bytes == wire
    assert counted.num_transfers == num_transfers
    assert counted.wire_bytes == sum(wire.values())
    assert counted.local_bytes == sum(pairs.values()) - sum(wire.values())
    assert sum(counted.send_bytes.values()) == sum(counted.receive_bytes.values())


@random_plans
@given(plans())
def test_no_byte_is_moved_that_the_rank_already_holds(plan: Plan) -> None:
    full = labels(plan.src.model)
    held = {
        rank: {int(x) for tensor in tensors.values() for x in tensor.ravel()}
        for rank, tensors in source_tensors(plan, full).items()
    }
    missing = 0
    for rank, tensors in expected_tensors(plan, full).items():
        needed = {int(x) for tensor in tensors.values() for x in tensor.ravel()} - {0}
        missing += len(needed - held.get(rank, set()))
    counted = cost(plan, itemsize=4)
    assert counted.minimum_bytes == 4 * missing
    assert counted.wire_bytes == counted.minimum_bytes


def test_replicas_share_the_sending() -> None:
    model = tiny_model(num_hidden_layers=16, hidden_size=64, intermediate_size=64)
    counted = cost(planned(model, "dp=4", "engine:tp=2"), itemsize=2)
    assert min(counted.send_bytes.values()) > 0
    assert counted.send_imbalance < 1.25
    assert counted.receive_imbalance < 1.02
    even = cost(planned(model, "dp=4", "engine:replicas=4"), itemsize=2)
    assert even.send_imbalance == even.receive_imbalance == 1.0


def test_every_shard_of_a_70b_model_sends_the_same() -> None:
    model = canonical_model(LARGE)
    plan = plan_reshard(make_layout(model, "fsdp=64"), make_layout(model, "engine:tp=8"))
    counted = cost(plan, itemsize=2)
    assert counted.wire_bytes == pytest.approx(141e9, rel=0.01)
    assert counted.receive_bytes[64] == pytest.approx(17.6e9, rel=0.01)
    assert counted.send_imbalance == pytest.approx(1.0, abs=1e-3)


def test_table_of_a_cost_names_the_pairs() -> None:
    text = str(cost(planned(tiny_model(), "fsdp=2", "engine:tp=2"), itemsize=4))
    for part in ("on the wire", "least possible", "rank 0 -> 2", "rank 1 -> 3", "x mean"):
        assert part in text


def test_nothing_moved_is_even() -> None:
    model = tiny_model()
    plan = planned(model, "fsdp=2", "fsdp=2", src_ranks=[0, 1], dst_ranks=[0, 1])
    counted = cost(plan, itemsize=4)
    assert (counted.wire_bytes, counted.minimum_bytes, counted.send_imbalance) == (0, 0, 1.0)
    assert counted.local_bytes == 4 * sum(x.size for x in labels(model).values())
