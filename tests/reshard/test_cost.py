"""Cost: bytes are those of the transfers, the least possible is reached, and replicas share."""

from collections import Counter

import numpy as np
import pytest

from shardloop.families import canonical_model
from shardloop.families.public import public_model
from shardloop.layout import make_layout
from shardloop.reshard.cost import Cost, bytes_text, cost
from shardloop.reshard.plan import Plan, plan_reshard
from tests.layout.reference import LARGE, labels, tiny_model
from tests.reshard.simulate import expected_tensors, planned, random_plan, source_tensors

random_plans = pytest.mark.parametrize("seed", range(100, 120))


def itemsize(plan: Plan, name: str) -> int:
    """Random models keep their biases in float32, all else in the 2 bytes of the model."""
    return 4 if name.endswith("bias") else 2


@random_plans
def test_cost_counts_the_transfers_of_all_ranks(seed: int) -> None:
    plan = random_plan(seed)
    pairs: Counter[tuple[int, int]] = Counter()
    num_transfers = 0
    for rank in plan.dst_ranks:
        for transfer in plan.receives(rank):
            num_transfers += 1
            size = transfer.num_elements * itemsize(plan, transfer.name)
            pairs[transfer.src_rank, transfer.dst_rank] += size
    counted = cost(plan, itemsize=2)
    wire = {pair: size for pair, size in pairs.items() if pair[0] != pair[1]}
    assert counted.pair_bytes == wire
    assert counted.num_transfers == num_transfers
    assert counted.wire_bytes == sum(wire.values())
    assert counted.local_bytes == sum(pairs.values()) - sum(wire.values())
    assert sum(counted.send_bytes.values()) == sum(counted.receive_bytes.values())


@random_plans
def test_bytes_on_the_wire_are_what_is_needed_less_what_is_held(seed: int) -> None:
    plan = random_plan(seed)
    full = labels(plan.src.model)
    held = {
        rank: {int(x) for tensor in tensors.values() for x in tensor.ravel()}
        for rank, tensors in source_tensors(plan, full).items()
    }
    size_of = np.zeros(1 + max(int(x.max()) for x in full.values()), int)
    for name, tensor in full.items():
        size_of[tensor.ravel()] = itemsize(plan, name)
    missing = 0
    for rank, tensors in expected_tensors(plan, full).items():
        for tensor in tensors.values():
            needed = {int(x) for x in tensor.ravel()} - {0} - held.get(rank, set())
            copies = Counter(int(x) for x in tensor.ravel())
            missing += sum(int(size_of[x]) * copies[x] for x in needed)
    counted = cost(plan, itemsize=2)
    assert counted.wire_bytes == counted.minimum_bytes == missing


def busiest_over_bound(counted: Cost, group: int) -> float:
    """Busiest sender over the least possible, where `group` ranks in a row share their elements.

    Only these can send what they hold, so the busiest of them sends at least their mean.
    """
    sent = np.array(list(counted.send_bytes.values())).reshape(-1, group)
    return float(sent.max() / sent.mean(axis=1).max())


@pytest.mark.parametrize(
    "src, dst, group",
    [
        ("pp=4,tp=2,dp=8", "engine:tp=8", 8),  # 20 layers in turns over 8 replicas
        ("pp=4,tp=2,dp=8", "engine:replicas=3,tp=8", 8),
        ("pp=8,tp=2,dp=7", "engine:tp=4", 7),
        ("tp=8,dp=6", "engine:replicas=4,tp=4", 6),
        ("fsdp=8,dp=8", "engine:tp=8", 8),
    ],
)
@pytest.mark.parametrize("same_ranks", [False, True])
def test_the_busiest_sender_is_at_the_lower_bound(
    src: str, dst: str, group: int, same_ranks: bool
) -> None:
    model = canonical_model(LARGE)
    a, b = make_layout(model, src), make_layout(model, dst)
    start = 0 if same_ranks else a.world_size
    plan = plan_reshard(a, b, dst_ranks=range(start, start + b.world_size))
    assert busiest_over_bound(cost(plan, itemsize=2), group) < 1.01


def test_replicas_share_the_sending_evenly() -> None:
    model = tiny_model(num_hidden_layers=16, hidden_size=64, intermediate_size=64)
    for dst in ("engine:tp=2", "engine:replicas=4", "engine:replicas=3"):
        counted = cost(planned(model, "dp=4", dst), itemsize=2)
        assert counted.send_imbalance < 1.05, dst
        assert counted.receive_imbalance < 1.02, dst


def test_every_shard_of_a_70b_model_sends_the_same() -> None:
    model = canonical_model(LARGE)
    plan = plan_reshard(make_layout(model, "fsdp=64"), make_layout(model, "engine:tp=8"))
    counted = cost(plan, itemsize=2)
    assert counted.wire_bytes == pytest.approx(141e9, rel=0.01)
    assert counted.receive_bytes[64] == pytest.approx(17.6e9, rel=0.01)
    assert counted.send_imbalance == pytest.approx(1.0, abs=1e-3)


def test_experts_of_thousands_of_ranks_move_once_and_evenly() -> None:
    model = canonical_model(public_model("DeepSeek-V3"))
    plan = planned(model, "megatron:pp=16,ep=64,dp=2", "engine:replicas=32,ep=64,tp=8")
    counted = cost(plan, itemsize=2)
    assert counted.matrix.shape == (2048, 2048)
    assert counted.wire_bytes == counted.minimum_bytes
    assert busiest_over_bound(counted, 128) < 1.05


def test_table_of_a_cost_names_the_largest_pairs() -> None:
    text = str(cost(planned(tiny_model(), "fsdp=2", "engine:tp=2"), itemsize=4))
    for part in ("on the wire", "least possible", "rank 0 -> 2", "rank 1 -> 3", "of the mean"):
        assert part in text
    assert "more pairs" not in text
    text = str(cost(planned(tiny_model(), "fsdp=5", "engine:replicas=5"), itemsize=4))
    assert sum("rank " in line for line in text.splitlines()) == 16
    assert "and 9 more pairs of ranks" in text


def test_nothing_moved_is_even() -> None:
    model = tiny_model()
    plan = planned(model, "fsdp=2", "fsdp=2", src_ranks=[0, 1], dst_ranks=[0, 1])
    counted = cost(plan, itemsize=4)
    assert (counted.wire_bytes, counted.minimum_bytes, counted.send_imbalance) == (0, 0, 1.0)
    assert counted.local_bytes == 4 * sum(x.size for x in labels(model).values())


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_499, "999 kB"), (999_600, "1 MB"),
     (12_340_000, "12.3 MB"), (999_999_999, "1 GB"), (1_342_000_000_000, "1.342 TB")],
)  # fmt: skip
def test_bytes_are_written_in_digits(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text
