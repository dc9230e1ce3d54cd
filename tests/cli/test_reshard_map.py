"""The map of a tensor shows what lies on the ranks, and every element that moves."""

import random
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from scripts import write_resharding
from shardloop.cli.reshard.picture import Column, _place, draw_map, spread
from shardloop.cli.reshard.picture_words import Words
from shardloop.cli.reshard.tensor_map import MAX_RANKS, MAX_SEGMENTS, Bar, TensorMap, tensor_map
from shardloop.errors import UsageError
from shardloop.families import canonical_model
from shardloop.families.public import public_model
from shardloop.layout import make_layout
from shardloop.layout.layout import Layout, box_of
from shardloop.reshard.plan import Plan, plan_reshard
from tests.cli.test_reshard import SMALL

MODEL = canonical_model(SMALL)
LAYOUTS = (
    "fsdp=3",
    "fsdp=2,tp=2",
    "zero3=3",
    "dp=2,zero3=2",
    "dp=3,fsdp=2",
    "tp=2",
    "pp=2,fsdp=2",
    "fsdp=4,ep=2",
    "megatron:tp=2",
    "megatron:pp=2,tp=2",
    "megatron:tp=2,ep=2,dp=2",
    "engine:tp=4",
    "engine:replicas=2,tp=2",
    "engine:tp=2,ep=2",
)
TENSORS = (
    None,
    "v_proj.weight",
    "o_proj.weight",
    "model.layers.2.self_attn.k_proj.weight",
    "embed_tokens.weight",
    "q_norm.weight",
    "model.layers.2.mlp.experts.3.up_proj.weight",
    "mlp.experts.{expert}.gate_proj.weight",
    "mlp.experts.{expert}.down_proj.weight",
)


def random_plan(seed: int) -> tuple[Plan, str | None]:
    rng = random.Random(seed)
    src, dst = (make_layout(MODEL, rng.choice(LAYOUTS)) for _ in range(2))
    first = rng.choice((0, src.world_size))
    ranks = range(first, first + dst.world_size)
    return plan_reshard(src, dst, dst_ranks=ranks), rng.choice(TENSORS)


def amount(shown: TensorMap, key: str) -> np.ndarray:
    """Zeros, one for each element of a class along the dims of the map."""
    c = next(c for c in shown.classes if c.key == key)
    sizes = [hi - lo for lo, hi in (c.domain[dim] for dim in shown.dims)]
    return np.zeros(sizes, dtype=int)


@pytest.mark.parametrize("seed", range(60))
def test_bands_bring_what_a_bar_shows(seed: int) -> None:
    plan, tensor = random_plan(seed)
    shown = tensor_map(plan, tensor)
    for bar in shown.dst:
        for c in shown.classes:
            held, brought = amount(shown, c.key), amount(shown, c.key)
            for segment in bar.segments:
                if segment.key == c.key:
                    box_of(held, segment.box)[...] += 1
            for band in shown.bands:
                if (band.dst_rank, band.key) == (bar.rank, c.key):
                    box_of(brought, band.box)[...] += 1
            assert (held <= 1).all(), "nothing is shown twice"
            if shown.hidden:  # a part of each element, from several
                assert ((brought > 0) == (held > 0)).all()
            else:
                assert (brought == held).all()


@pytest.mark.parametrize("seed", range(60))
def test_bands_leave_from_what_their_source_holds(seed: int) -> None:
    plan, tensor = random_plan(seed)
    shown = tensor_map(plan, tensor)
    bars = {bar.rank: bar for bar in shown.src}
    for band in shown.bands:
        held = amount(shown, band.key)
        for segment in bars[band.src_rank].segments:
            if segment.key == band.key:
                box_of(held, segment.box)[...] = 1
        assert box_of(held, band.box).all()


@pytest.mark.parametrize("src", ["dp=3,fsdp=2", "megatron:pp=2,dp=2", "zero3=3"])
@pytest.mark.parametrize("layer", range(3))
def test_bands_are_the_transfers_of_the_layer(src: str, layer: int) -> None:
    plan = plan_reshard(make_layout(MODEL, src), make_layout(MODEL, "engine:replicas=2,tp=4"))
    name = f"model.layers.{layer}.self_attn.o_proj.weight"
    for rank in plan.dst_ranks:
        bands = {
            (band.src_rank, band.box)
            for band in tensor_map(plan, name).bands
            if band.dst_rank == rank
        }
        assert bands == {(t.src_rank, t.box) for t in plan.receives(rank) if t.name == name}


def rows_by_label(layout: Layout, rank: int, names: list[str]) -> list[tuple[str, int] | None]:
    """What lies in each row of a rank's local tensors with these tensors; None is padding."""
    wanted = [piece for piece in layout.pieces(rank) if piece.name in names]
    found: list[tuple[str, int] | None] = []
    for local_name, shape in layout.local_shapes(rank).items():
        mine = [piece for piece in wanted if piece.local_name == local_name]
        rows: list[tuple[str, int] | None] = [None] * shape[-2 if len(shape) > 1 else 0]
        for piece in mine:
            array = {local_name: np.zeros(shape, dtype=bool)}
            piece.of(array)[...] = True
            # Of a stack, the one expert; of a matrix, any column.
            marked = array[local_name].reshape(-1, len(rows), shape[-1] if len(shape) > 1 else 1)
            places = np.flatnonzero(marked.any(axis=(0, 2)))
            for place, row in zip(places.tolist(), range(*piece.box[0]), strict=True):
                rows[place] = (piece.name, row)
        found += rows if mine else []
    return found


@pytest.mark.parametrize("spec", [spec for spec in LAYOUTS if "zero3" not in spec])
@pytest.mark.parametrize("tensor", [t for t in TENSORS if t is None or "{expert}" not in t])
def test_bar_has_the_rows_of_the_rank_in_their_places(spec: str, tensor: str | None) -> None:
    layout = make_layout(MODEL, spec)
    shown = tensor_map(plan_reshard(make_layout(MODEL, "fsdp=1"), layout, src_ranks=[99]), tensor)
    layer, expert = (2, 3) if tensor and "layers.2" in tensor else (shown.classes[0].layers[0], 0)
    names = {c.key: c.name(layer, expert) for c in shown.classes}
    for bar in shown.dst:
        rows: list[tuple[str, int] | None] = [None] * bar.length
        for segment in bar.segments:
            for i, row in enumerate(range(*segment.box[0])):
                rows[segment.start + i] = (names[segment.key], row)
        assert rows == rows_by_label(layout, bar.rank - 1, list(names.values()))
        assert all(rows[i] is None for lo, hi in bar.padding for i in range(lo, hi))


@pytest.mark.parametrize("seed", range(40))
def test_bands_of_a_bar_lie_beside_each_other(seed: int) -> None:
    """At a destination, where each element arrives once, no two bands share a height."""
    plan, tensor = random_plan(seed)
    shown = tensor_map(plan, tensor)
    if shown.hidden:
        return
    column = Column(shown.dst, 0.0, tuple(0.0 for _ in shown.dst), 1.0)
    for bar in shown.dst:
        bands = [band for band in shown.bands if band.dst_rank == bar.rank]
        places = sorted(_place(column, bar.rank, band, shown) for band in bands)
        for (_, end), (start, _) in pairwise(places):
            assert start >= end - 1e-9


@pytest.mark.parametrize("seed", range(50))
def test_spread_labels_keep_order_and_distance(seed: int) -> None:
    rng = random.Random(seed)
    wanted = [rng.uniform(0, 3) for _ in range(rng.randint(1, 20))]
    placed = spread(wanted, 0.25)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    gaps = np.diff([placed[i] for i in order])
    assert (gaps >= 0.25 - 1e-9).all()
    assert sum(placed) == pytest.approx(sum(wanted))
    assert spread([0.0, 1.0, 2.0], 0.25) == [0.0, 1.0, 2.0]


def test_kv_heads_on_several_ranks_are_told() -> None:
    plan = plan_reshard(make_layout(MODEL, "fsdp=2"), make_layout(MODEL, "engine:tp=4"))
    words = Words(tensor_map(plan), MODEL)
    assert "k, v: every element on 2 destination ranks" in list(words.notes())
    labels = [words.of(group) for bar in words.shown.dst for group in words.labelled(bar)]
    assert labels[:6] == [
        "q 0:8 · heads 0–1",
        "k 0:4 · head 0",
        "v 0:4 · head 0",
        "q 8:16 · heads 2–3",
        "k 0:4 · head 0",
        "v 0:4 · head 0",
    ]


def test_first_ranks_are_drawn_of_many() -> None:
    plan = plan_reshard(make_layout(MODEL, "fsdp=16"), make_layout(MODEL, "engine:replicas=5,tp=4"))
    shown = tensor_map(plan)
    assert len(shown.dst) == MAX_RANKS and shown.num_dst == 20
    assert f"{MAX_RANKS} of 20 destination ranks are shown" in list(Words(shown, MODEL).notes())


def test_bars_of_many_boxes_are_fewer() -> None:
    model = canonical_model(public_model("Llama-3.1-8B"))
    src, dst = make_layout(model, "megatron:dp=16"), make_layout(model, "engine:tp=8")
    shown = tensor_map(plan_reshard(src, dst))
    assert [len(bar.segments) for bar in shown.src] == [24] * (MAX_SEGMENTS // 24)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("qkv_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
        ("model.layers.2.self_attn.qkv_proj.weight", "model.layers.2.self_attn.qkv_proj.weight"),
        ("layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.weight"),
        ("w13_weight", "model.layers.0.mlp.experts.w13_weight"),
        ("experts.*.down_proj.weight", "model.layers.0.mlp.experts.*.down_proj.weight"),
        ("experts.2.down_proj.weight", "model.layers.0.mlp.experts.2.down_proj.weight"),
        ("model.layers.{layer}.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
    ],
)
def test_tensor_is_found_by_any_of_its_names(name: str, found: str) -> None:
    plan = plan_reshard(make_layout(MODEL, "fsdp=2"), make_layout(MODEL, "engine:tp=2"))
    assert tensor_map(plan, name).name == found


@pytest.mark.parametrize("name", ["weight", "", "q_prj.weight", "layers.x.q_proj.weight"])
def test_unknown_tensor_is_refused_with_the_nearest(name: str) -> None:
    plan = plan_reshard(make_layout(MODEL, "fsdp=2"), make_layout(MODEL, "engine:tp=2"))
    with pytest.raises(UsageError, match="the nearest are model"):
        tensor_map(plan, name)


def test_lost_ranks_are_not_drawn() -> None:
    src = make_layout(MODEL, "dp=2,fsdp=2")
    plan = plan_reshard(src, make_layout(MODEL, "engine:tp=2"), lost=(1,))
    assert [bar.rank for bar in tensor_map(plan).src] == [0, 2, 3]


def test_same_map_is_the_same_file(tmp_path: Path) -> None:
    model = canonical_model(public_model("Qwen3-0.6B"))
    plan = plan_reshard(make_layout(model, "fsdp=3"), make_layout(model, "megatron:tp=4"))
    files = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for file in files:
        draw_map(tensor_map(plan, "embed_tokens.weight"), model, file, title="a to b")
    text = files[0].read_text()
    assert text == files[1].read_text()
    for label in ("rank 0", "rank 6", "embed_tokens 0:50646", "padding, 128 rows"):
        assert f"<!-- {label} -->" in text


def test_padding_of_the_vocabulary_is_told() -> None:
    plan = plan_reshard(make_layout(MODEL, "fsdp=2"), make_layout(MODEL, "engine:tp=4"))
    bars = tensor_map(plan, "embed_tokens.weight").dst
    assert [bar.length for bar in bars] == [13] * 4
    assert [bar.padding for bar in bars] == [(), (), (), ((11, 13),)]


def test_bar_without_rows_is_not_drawn() -> None:
    plan = plan_reshard(make_layout(MODEL, "fsdp=5"), make_layout(MODEL, "engine:tp=2"))
    bars: tuple[Bar, ...] = tensor_map(plan, "q_norm.weight").src
    assert [bar.length for bar in bars] == [1, 1, 1, 1]


def test_picture_of_the_page_is_current(tmp_path: Path) -> None:
    """By its labels: outlines may differ between releases of matplotlib."""
    drawn = tmp_path / "map.svg"
    write_resharding.draw(drawn)
    labels = [
        re.findall(r"<!-- (.*) -->", p.read_text()) for p in (drawn, write_resharding.PICTURE)
    ]
    assert labels[0] == labels[1], "run `make docs`"
