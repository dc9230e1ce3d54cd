"""Layouts: each rank holds what plain indexing of the full tensors gives it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardloop.errors import LayoutError
from shardloop.layout import Layout, box_of, make_layout
from tests.layout.reference import (
    Arrays,
    any_models,
    any_specs,
    expected_local,
    labels,
    models,
    specs,
    tiny_model,
)


def from_pieces(layout: Layout, rank: int, full: Arrays) -> Arrays:
    """Fill a rank's tensors through its pieces; what no piece covers stays 0."""
    local = {name: np.zeros(shape, int) for name, shape in layout.local_shapes(rank).items()}
    for piece in layout.pieces(rank):
        place = piece.of(local)
        assert (place == 0).all(), f"{piece} overlaps another piece"
        place[...] = box_of(full[piece.name], piece.box)
    return local


def assert_same(actual: Arrays, expected: Arrays) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(actual[name], tensor, err_msg=name)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_pieces_of_every_rank_are_those_of_plain_indexing(data: st.DataObject) -> None:
    model = data.draw(models())
    spec = data.draw(specs(model))
    full, layout = labels(model), make_layout(model, spec)
    for rank in range(layout.world_size):
        assert_same(from_pieces(layout, rank, full), expected_local(model, spec, rank, full))


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_every_scheme_is_plain_indexing_for_every_family(data: st.DataObject) -> None:
    model = data.draw(any_models())
    spec = data.draw(any_specs(model))
    full, layout = labels(model), make_layout(model, spec)
    for rank in range(layout.world_size):
        assert_same(from_pieces(layout, rank, full), expected_local(model, spec, rank, full))


def test_outermost_axis_comes_first() -> None:
    model = tiny_model()
    inner, outer = make_layout(model, "fsdp=2,tp=4"), make_layout(model, "tp=4,fsdp=2")
    for f in range(2):
        for t in range(4):
            assert inner.local_shapes(4 * f + t) == outer.local_shapes(2 * t + f)
            a = [(p.view, p.box) for p in inner.pieces(4 * f + t)]
            assert a == [(p.view, p.box) for p in outer.pieces(2 * t + f)]


def test_uneven_and_empty_shards_are_listed() -> None:
    layout = make_layout(tiny_model(hidden_size=20), "fsdp=8")
    name = "model.norm.weight"
    assert [layout.local_shapes(r)[name] for r in range(8)] == [*[(3,)] * 6, (2,), (0,)]
    assert [p for p in layout.pieces(7) if p.name == name] == []


def test_fsdp_chunks_what_tp_leaves() -> None:
    """10 rows, tp=2, fsdp=3: [0:2] [2:4] [4:5] and [5:7] [7:9] [9:10]."""
    layout = make_layout(tiny_model(vocab_size=10), "tp=2,fsdp=3")
    boxes = [p.box[0] for r in range(6) for p in layout.pieces(r) if "embed" in p.name]
    assert boxes == [(0, 2), (2, 4), (4, 5), (5, 7), (7, 9), (9, 10)]


@pytest.mark.parametrize("scheme", ["", "engine:"])
@pytest.mark.parametrize("tp, heads", [(2, [0, 1]), (4, [0, 0, 1, 1]), (8, [0] * 4 + [1] * 4)])
def test_rank_t_has_kv_head_t_over_copies(scheme: str, tp: int, heads: list[int]) -> None:
    model = tiny_model(num_attention_heads=8, num_key_value_heads=2, head_dim=3)
    layout = make_layout(model, f"{scheme}tp={tp}")
    for kind in ("k", "v"):
        name = f"model.layers.1.self_attn.{kind}_proj.weight"
        held = [p.box[0] for r in range(tp) for p in layout.pieces(r) if p.name == name]
        assert held == [(3 * head, 3 * head + 3) for head in heads]


def test_engine_rank_has_its_gate_rows_then_its_up_rows() -> None:
    model = tiny_model(intermediate_size=4)
    full, layout = labels(model), make_layout(model, "engine:tp=2")
    gate = full["model.layers.0.mlp.gate_proj.weight"]
    up = full["model.layers.0.mlp.up_proj.weight"]
    for rank in range(2):
        rows = slice(2 * rank, 2 * rank + 2)
        local = from_pieces(layout, rank, full)["model.layers.0.mlp.gate_up_proj.weight"]
        np.testing.assert_array_equal(local, np.concatenate([gate[rows], up[rows]]))
    halves = np.array_split(np.concatenate([gate, up]), 2)
    assert halves[0].shape == local.shape
    assert not np.array_equal(halves[1], local)


def test_engine_pads_the_vocabulary_at_the_end_only() -> None:
    model = tiny_model(vocab_size=10)
    full, layout = labels(model), make_layout(model, "engine:tp=4")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = np.concatenate([from_pieces(layout, r, full)[name] for r in range(4)])
        assert rows.shape[0] == 12
        np.testing.assert_array_equal(rows[:10], full[name])
        assert (rows[10:] == 0).all()


def test_tied_head_is_the_embedding() -> None:
    for spec in ("fsdp=2", "engine:tp=2"):
        layout = make_layout(tiny_model(tie_word_embeddings=True), spec)
        names = layout.local_shapes(0)
        assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


@pytest.mark.parametrize("scheme", ["", "engine:"])
@pytest.mark.parametrize(
    "heads, kv_heads, tp", [(12, 4, 6), (12, 3, 2), (12, 6, 4), (6, 3, 2), (9, 3, 2)]
)
def test_straddling_heads_are_refused(scheme: str, heads: int, kv_heads: int, tp: int) -> None:
    model = tiny_model(
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=24
    )
    with pytest.raises(LayoutError, match=f"tp={tp} does not divide"):
        make_layout(model, f"{scheme}tp={tp}")


@pytest.mark.parametrize(
    "sizes, tp, message",
    [
        ((24, 8, 48), 3, "tp=3 does not divide num_kv_heads=8; choose tp from 1, 2, 4, 8, 24"),
        ((8, 2, 24), 3, "tp=3 does not divide num_heads=8, tp=3 does not divide, nor is it"),
        ((8, 8, 12), 8, "tp=8 does not divide intermediate_size=12; choose tp from 1, 2, 4"),
        ((12, 4, 24), 6, "tp=6 does not divide, nor is it a multiple of, num_kv_heads=4; choose"),
    ],
)
def test_tp_that_does_not_fit_is_refused_with_those_that_do(
    sizes: tuple[int, int, int], tp: int, message: str
) -> None:
    heads, kv_heads, intermediate = sizes
    model = tiny_model(
        num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=intermediate
    )
    with pytest.raises(LayoutError) as error:
        make_layout(model, f"tp={tp}")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("spec", ["fsdp=3", "tp=2,fsdp=2", "engine:tp=4"])
def test_layout_does_not_depend_on_the_order_of_tensors(spec: str) -> None:
    model = tiny_model("qwen2")
    reordered = replace(model, classes=model.classes[::-1])
    for rank in range(make_layout(model, spec).world_size):
        a = sorted(make_layout(model, spec).pieces(rank), key=repr)
        assert a == sorted(make_layout(reordered, spec).pieces(rank), key=repr)


def test_a_fused_tensor_that_lacks_a_part_is_refused() -> None:
    model = tiny_model("qwen2")
    kept = tuple(c for c in model.classes if c.key != "self_attn.k_proj.bias")
    with pytest.raises(LayoutError, match=r"has no self_attn\.k_proj\.bias"):
        make_layout(replace(model, classes=kept), "engine:tp=2")


def test_a_rank_outside_the_layout_is_refused() -> None:
    layout = make_layout(tiny_model(), "fsdp=2")
    for rank in (-1, 2):
        with pytest.raises(IndexError, match=f"no rank {rank}; choose from 0 to 1"):
            layout.local_shapes(rank)
        with pytest.raises(IndexError, match=f"no rank {rank}"):
            list(layout.pieces(rank))
