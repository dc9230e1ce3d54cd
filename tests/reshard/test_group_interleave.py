"""A foreign layout by hand: q, k and v fused group by group, as Megatron-style trainers keep them.

No scheme makes it; it shows that a layout is a table, and that fusing by group and fusing by kind
are told apart. H=4 query heads, K=2 kv heads, head_dim=1: rows q0..q3, k0, k1, v0, v1.
"""

import dataclasses

import numpy as np
import pytest

from shardloop.families import CanonicalModel
from shardloop.layout import Layout, make_layout
from shardloop.layout.strips import cat, pick, split, whole
from shardloop.layout.tables import Cut
from shardloop.reshard.inprocess import execute_inprocess
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import verify
from tests.layout.reference import Arrays, expected_local, tiny_model
from tests.reshard.simulate import empty_tensors

Q, K, V = (f"self_attn.{kind}_proj.weight" for kind in "qkv")
FUSED = "model.layers.0.self_attn.linear_qkv.weight"
ROWS = {"q": [10, 11, 12, 13], "k": [20, 21], "v": [30, 31]}


def model() -> CanonicalModel:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 1}
    return tiny_model("llama", num_hidden_layers=1, hidden_size=4, intermediate_size=8, **sizes)


def interleaved(model: CanonicalModel, tp: int) -> Layout:
    """The hf layout at this tp, with one qkv tensor that lists q, k and v group after group."""
    layout = make_layout(model, f"tp={tp}")
    groups = model.num_kv_heads
    members = ((Q, model.num_heads), (K, groups), (V, groups))
    by_group = cat(*(split(whole(key, (0, heads)), groups) for key, heads in members))
    stripe = split(pick(by_group, [range(groups)]), tp)
    q = next(tensor for tensor in layout.tensors if tensor.keys == (Q,))
    layers, experts, _, width = q.cuts
    fused = dataclasses.replace(
        q,
        template="model.layers.{layer}.self_attn.linear_qkv.weight",
        keys=(Q, K, V),
        cuts=(layers, experts, Cut((2,), (layout.mesh[-1],), stripe), width),
    )
    others = tuple(tensor for tensor in layout.tensors if tensor.keys[0] not in (Q, K, V))
    return dataclasses.replace(layout, tensors=(fused, *others))


def weights(model: CanonicalModel) -> Arrays:
    """Every row of q, k and v holds its label, whatever the column; all else is 1."""
    full: Arrays = {name: np.ones(shape, int) for name, shape in model.tensor_shapes().items()}
    for kind, labels in ROWS.items():
        name = f"model.layers.0.self_attn.{kind}_proj.weight"
        full[name] = np.repeat(np.array(labels)[:, None], full[name].shape[1], axis=1)
    return full


def moved(src: Layout, dst: Layout, tensors: dict[int, Arrays]) -> dict[int, Arrays]:
    """Destination ranks from 0, after a proved plan."""
    plan = plan_reshard(src, dst)
    result = empty_tensors(plan)
    execute_inprocess(verify(plan), tensors, result)
    return {i: result[rank] for i, rank in enumerate(plan.dst_ranks)}


def rows_of(tensor: np.ndarray) -> list[int]:
    return tensor[:, 0].tolist()


@pytest.mark.parametrize(
    ("tp", "expected"),
    [
        (1, [[10, 11, 20, 30, 12, 13, 21, 31]]),
        (2, [[10, 11, 20, 30], [12, 13, 21, 31]]),
    ],
)
def test_group_after_group_is_not_kind_after_kind(tp: int, expected: list[list[int]]) -> None:
    m = model()
    source = {0: expected_local(m, "fsdp=1", 0, weights(m))}
    result = moved(make_layout(m, "fsdp=1"), interleaved(m, tp), source)
    assert [rows_of(result[rank][FUSED]) for rank in range(tp)] == expected
    by_kind = np.split(np.array(ROWS["q"] + ROWS["k"] + ROWS["v"]), tp)
    assert expected != [part.tolist() for part in by_kind]


@pytest.mark.parametrize("tp", [1, 2])
def test_there_and_back_is_the_identity(tp: int) -> None:
    m = model()
    source = {0: expected_local(m, "fsdp=1", 0, weights(m))}
    there = moved(make_layout(m, "fsdp=1"), interleaved(m, tp), source)
    back = moved(interleaved(m, tp), make_layout(m, "fsdp=1"), there)
    for name, tensor in source[0].items():
        np.testing.assert_array_equal(back[0][name], tensor, err_msg=name)


def test_more_engine_ranks_than_groups_get_their_own_query_head_and_their_groups_kv() -> None:
    m = model()
    source = {0: expected_local(m, "fsdp=1", 0, weights(m))}
    stripes = moved(make_layout(m, "fsdp=1"), interleaved(m, 2), source)
    engine = moved(interleaved(m, 2), make_layout(m, "engine:tp=4"), stripes)
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    assert [rows_of(engine[rank][qkv]) for rank in range(4)] == [
        [10, 20, 30],
        [11, 20, 30],
        [12, 21, 31],
        [13, 21, 31],
    ]
