"""Training layouts under Hugging Face names, by example: flat, pipeline and expert parallel."""

import numpy as np
import pytest

from shardloop.families import CanonicalModel
from shardloop.families.lora import lora_adapter
from shardloop.layout import Layout, make_layout
from tests.families.configs import moe_config
from tests.layout.reference import tiny_model

NORM = "model.norm.weight"


def moe_model(**changes: object) -> CanonicalModel:
    return tiny_model(**moe_config("qwen3_moe", **changes))


def boxes(layout: Layout, rank: int, name: str) -> list[tuple[tuple[int, int], ...]]:
    return [piece.box for piece in layout.pieces(rank) if piece.name == name]


def layers(layout: Layout, rank: int) -> list[int]:
    names = {n for n in layout.local_shapes(rank) if "post_attention_layernorm" in n}
    return sorted(int(name.split(".")[2]) for name in names)


def experts(layout: Layout, rank: int) -> list[int]:
    stem = "model.layers.1.mlp.experts."
    names = [n for n in layout.local_shapes(rank) if n.startswith(stem) and "up_proj" in n]
    return sorted(int(name.removeprefix(stem).split(".")[0]) for name in names)


def test_flat_partitions_are_chunks_of_the_flattened_tensor() -> None:
    """The norm has 20 elements; the embedding 10 x 20 = 200, of which each of 3 has 67, 67, 66."""
    layout = make_layout(tiny_model(), "zero3=3")
    name = "model.embed_tokens.weight"
    assert [layout.local_shapes(r)[name] for r in range(3)] == [(67,), (67,), (66,)]
    assert boxes(layout, 0, name) == [((0, 3), (0, 20)), ((3, 4), (0, 7))]
    assert boxes(layout, 1, name) == [
        ((3, 4), (7, 20)),
        ((4, 6), (0, 20)),
        ((6, 7), (0, 14)),
    ]
    layout = make_layout(tiny_model(), "zero3=8")
    assert [layout.local_shapes(r)[NORM] for r in range(8)] == [*[(3,)] * 6, (2,), (0,)]


def test_flat_partitions_come_after_tensor_parallelism() -> None:
    """down_proj [20, 8], tp=2: columns 0:4 and 4:8, each of 80 elements in 3 chunks."""
    layout = make_layout(tiny_model(), "tp=2,zero3=3")
    name = "model.layers.0.mlp.down_proj.weight"
    assert [layout.local_shapes(r)[name] for r in range(6)] == [(27,), (27,), (26,)] * 2
    assert boxes(layout, 3, name) == [((0, 6), (4, 8)), ((6, 7), (4, 7))]


@pytest.mark.parametrize("pp, expected", [(2, [3, 2]), (3, [2, 2, 1]), (5, [1] * 5)])
def test_stages_are_consecutive_and_the_ends_have_embedding_and_head(
    pp: int, expected: list[int]
) -> None:
    layout = make_layout(tiny_model(num_hidden_layers=5), f"pp={pp}")
    held = [layers(layout, rank) for rank in range(pp)]
    assert [len(part) for part in held] == expected
    assert [layer for part in held for layer in part] == list(range(5))
    has = {
        name: [rank for rank in range(pp) if name in layout.local_shapes(rank)]
        for name in ("model.embed_tokens.weight", NORM, "lm_head.weight")
    }
    assert has == {
        "model.embed_tokens.weight": [0],
        NORM: [pp - 1],
        "lm_head.weight": [pp - 1],
    }


@pytest.mark.parametrize("scheme, head", [("", "lm_head.weight"), ("megatron:", "output_layer")])
def test_head_of_a_tied_model_is_a_copy_of_the_embedding_on_the_last_stage(
    scheme: str, head: str
) -> None:
    model = tiny_model(tie_word_embeddings=True)
    layout = make_layout(model, f"{scheme}pp=2,dp=2")
    for rank in range(4):
        pieces = list(layout.pieces(rank))
        assert any(p.local_name.startswith(head) for p in pieces) == (rank >= 2)
        assert "model.embed_tokens.weight" in {p.name for p in pieces}
    names = make_layout(model, f"{scheme}dp=2").local_shapes(0)
    assert not any(name.startswith(head) for name in names)


def test_an_adapter_of_a_tied_model_has_no_head() -> None:
    adapter = lora_adapter(tiny_model(tie_word_embeddings=True), rank=2, targets=["q_proj"])
    layout = make_layout(adapter, "pp=2")
    held = {piece.name for rank in range(2) for piece in layout.pieces(rank)}
    assert held == set(adapter.tensor_shapes())


@pytest.mark.parametrize(
    "num_experts, ep, expected",
    [
        (4, 2, [[0, 1], [2, 3]]),
        (5, 3, [[0, 1], [2, 3], [4]]),
        (5, 4, [[0, 1], [2, 3], [4], []]),
    ],
)
def test_experts_are_chunked_over_the_ranks_of_fsdp(
    num_experts: int, ep: int, expected: list[list[int]]
) -> None:
    layout = make_layout(moe_model(num_experts=num_experts), f"fsdp={ep},ep={ep}")
    assert layout.world_size == ep
    assert [experts(layout, rank) for rank in range(ep)] == expected


def test_what_expert_parallelism_leaves_is_chunked_further() -> None:
    """fsdp=4, ep=2: two ranks have the same experts, each half of the 6 rows of every one."""
    layout = make_layout(moe_model(), "fsdp=4,ep=2")
    assert [experts(layout, rank) for rank in range(4)] == [[0, 1], [2, 3]] * 2
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    assert [boxes(layout, rank, name) for rank in range(4)] == [
        [((0, 3), (0, 20))],
        [],
        [((3, 6), (0, 20))],
        [],
    ]
    router = "model.layers.0.mlp.gate.weight"
    assert [len(boxes(layout, rank, router)) for rank in range(4)] == [1] * 4


def test_dense_and_expert_meshes_share_the_ranks() -> None:
    """8 ranks, tp=2 x fsdp=4 and ep=4: rank 5 is tp 1, fsdp 2, and ep 1 of the second half."""
    layout = make_layout(moe_model(), "fsdp=4,tp=2,ep=4")
    assert layout.world_size == 8
    assert boxes(layout, 5, "model.layers.0.self_attn.q_proj.weight") == [((6, 7), (0, 20))]
    assert experts(layout, 5) == [1]
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    assert boxes(layout, 1, name) == [((0, 3), (0, 20))]
    assert boxes(layout, 5, name) == [((3, 6), (0, 20))]


@pytest.mark.parametrize("spec", ["tp=2", "fsdp=2,tp=2", "megatron:tp=2", "engine:tp=2"])
def test_tensor_parallel_ranks_have_whole_norms_and_routers(spec: str) -> None:
    """Also where activations are cut along the sequence: the weights are not."""
    layout = make_layout(moe_model(), spec)
    for key in ("input_layernorm.weight", "mlp.gate.weight", "self_attn.q_norm.weight"):
        name = f"model.layers.0.{key}"
        size = len(layout.model.class_of[key].shape)
        first, second = boxes(layout, 0, name), boxes(layout, 1, name)
        assert first == second and len(first[0]) == size


def test_copies_of_everything_are_outside_the_shared_ranks() -> None:
    layout = make_layout(moe_model(), "dp=2,fsdp=2,ep=2")
    assert layout.world_size == 4
    for rank in range(2):
        a, b = ({(p.name, p.box) for p in layout.pieces(r)} for r in (rank, rank + 2))
        assert a == b


def test_layouts_of_axes_that_are_left_out_are_those_of_size_one() -> None:
    model = moe_model()
    short, full = make_layout(model, "fsdp=2"), make_layout(model, "pp=1,dp=1,fsdp=2,tp=1")
    for rank in range(2):
        assert short.local_shapes(rank) == full.local_shapes(rank)
        assert list(short.pieces(rank)) == list(full.pieces(rank))


def test_numbers_of_elements_do_not_depend_on_the_layout() -> None:
    model = moe_model(num_experts=5)
    total = sum(int(np.prod(shape)) for shape in model.tensor_shapes().values())
    for spec in ("fsdp=3", "zero3=5", "pp=2,fsdp=2", "fsdp=4,ep=2", "zero3=2,ep=4", "fsdp=2,tp=2"):
        layout = make_layout(model, spec)
        held = {
            (piece.name, piece.box)
            for rank in range(layout.world_size)
            for piece in layout.pieces(rank)
        }
        assert sum(int(np.prod([hi - lo for lo, hi in box])) for _, box in held) == total
