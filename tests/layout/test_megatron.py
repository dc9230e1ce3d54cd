"""Megatron layouts by example: fusing, padding, numbers that count from a rank's own."""

import numpy as np
import pytest

from shardloop.errors import LayoutError
from shardloop.families.fp8 import with_block_fp8
from shardloop.families.lora import with_lora
from shardloop.layout import make_layout
from tests.families.configs import moe_config
from tests.layout.reference import labels, tiny_model
from tests.layout.test_schemes import from_pieces

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
ROWS = {"q": [10, 11, 12, 13], "k": [20, 21], "v": [30, 31]}


def rows_of_qkv(tp: int) -> list[list[int]]:
    """H=4 query heads, K=2 groups, head_dim=1: every row holds its label."""
    model = tiny_model(head_dim=1, hidden_size=1)
    full = labels(model)
    for kind, rows in ROWS.items():
        full[f"model.layers.0.self_attn.{kind}_proj.weight"] = np.array(rows)[:, None]
    layout = make_layout(model, f"megatron:tp={tp}")
    return [from_pieces(layout, rank, full)[QKV][:, 0].tolist() for rank in range(tp)]


@pytest.mark.parametrize(
    "tp, expected",
    [
        (1, [[10, 11, 20, 30, 12, 13, 21, 31]]),
        (2, [[10, 11, 20, 30], [12, 13, 21, 31]]),
        (4, [[10, 11], [20, 30], [12, 13], [21, 31]]),
    ],
)
def test_qkv_lies_group_after_group_and_is_shared_by_rows(
    tp: int, expected: list[list[int]]
) -> None:
    """With more ranks than groups a rank need not have whole groups."""
    assert rows_of_qkv(tp) == expected
    by_kind = np.split(np.array(ROWS["q"] + ROWS["k"] + ROWS["v"]), tp)
    assert expected != [part.tolist() for part in by_kind]


def test_fc1_is_gate_then_up_on_each_rank() -> None:
    model = tiny_model(intermediate_size=4)
    full, layout = labels(model), make_layout(model, "megatron:tp=2")
    gate, up = (full[f"model.layers.1.mlp.{kind}_proj.weight"] for kind in ("gate", "up"))
    for rank in range(2):
        local = from_pieces(layout, rank, full)["decoder.layers.1.mlp.linear_fc1.weight"]
        rows = slice(2 * rank, 2 * rank + 2)
        np.testing.assert_array_equal(local, np.concatenate([gate[rows], up[rows]]))


@pytest.mark.parametrize(
    "vocab, tp, rows", [(10, 1, 128), (128, 1, 128), (10, 2, 128), (300, 2, 256)]
)
def test_vocabulary_is_padded_to_a_multiple_of_128_on_every_rank(
    vocab: int, tp: int, rows: int
) -> None:
    model = tiny_model(vocab_size=vocab)
    full, layout = labels(model), make_layout(model, f"megatron:tp={tp}")
    local = [from_pieces(layout, rank, full) for rank in range(tp)]
    for ours, theirs in (
        ("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
        ("lm_head.weight", "output_layer.weight"),
    ):
        assert [tensors[theirs].shape[0] for tensors in local] == [rows] * tp
        whole = np.concatenate([tensors[theirs] for tensors in local])
        np.testing.assert_array_equal(whole[:vocab], full[ours])
        assert (whole[vocab:] == 0).all()


def layers_of(model_layers: int, spec: str) -> list[list[tuple[str, int]]]:
    """Local name and layer in the model of each layer's norm, by rank."""
    layout = make_layout(tiny_model(num_hidden_layers=model_layers), spec)
    return [
        sorted(
            (p.local_name.split(".")[2], int(p.name.split(".")[2]))
            for p in layout.pieces(rank)
            if "input_layernorm" in p.name
        )
        for rank in range(layout.world_size)
    ]


def test_interleaved_stages_have_their_chunks_in_turn() -> None:
    """8 layers, 2 stages of 2 chunks: layers 0 1 and 4 5, then 2 3 and 6 7."""
    assert layers_of(8, "megatron:pp=2,vpp=2") == [
        [("0", 0), ("1", 1), ("2", 4), ("3", 5)],
        [("0", 2), ("1", 3), ("2", 6), ("3", 7)],
    ]
    assert layers_of(5, "megatron:pp=2") == [
        [("0", 0), ("1", 1), ("2", 2)],
        [("0", 3), ("1", 4)],
    ]


def test_dense_and_expert_layers_are_counted_together() -> None:
    """One dense layer and three with experts on two stages, each numbered from 0."""
    config = moe_config("deepseek_v3", num_hidden_layers=4)
    layout = make_layout(tiny_model(**config), "megatron:pp=2,ep=2")
    names = [set(layout.local_shapes(rank)) for rank in (0, 2)]
    norms = ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
    found = [
        [n for n in (0, 1) for norm in norms[i : i + 1] if f"decoder.layers.{n}.{norm}" in held]
        for held in names
        for i in (0, 1)
    ]
    assert found == [[0], [1], [], [0, 1]]
    experts = [
        {p.local_name for p in layout.pieces(rank) if p.name.endswith("experts.2.down_proj.weight")}
        for rank in range(4)
    ]
    assert experts == [
        set(),
        {"decoder.layers.1.mlp.experts.linear_fc2.weight0"},
        set(),
        {f"decoder.layers.{n}.mlp.experts.linear_fc2.weight0" for n in (0, 1)},
    ]


def test_experts_have_a_mesh_of_their_own_over_the_same_ranks() -> None:
    """tp=2, ep=4 and etp=1 are 4 ranks: dense tensors on 2 x 2, experts on 4."""
    model = tiny_model(**moe_config("qwen3_moe"))
    layout = make_layout(model, "megatron:dp=2,tp=2,ep=4,etp=1")
    assert layout.world_size == 8
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    assert [r for r in range(8) if any(p.name == name for p in layout.pieces(r))] == [1, 5]
    default = make_layout(model, "megatron:tp=2,ep=4")
    assert default.world_size == 8
    held = {r: [p.box[0] for p in default.pieces(r) if p.name == name] for r in range(8)}
    assert {r: b for r, b in held.items() if b} == {2: [(0, 3)], 3: [(3, 6)]}


def test_tensors_that_megatron_has_no_name_for_are_refused() -> None:
    lora = with_lora(tiny_model(), rank=2, targets=["q_proj"])
    with pytest.raises(LayoutError, match=r"no name for self_attn\.q_proj\.lora_A\.weight, self"):
        make_layout(lora, "megatron:tp=2")
    with pytest.raises(LayoutError, match=r"no name for .*weight_scale_inv"):
        make_layout(with_block_fp8(tiny_model()), "megatron:tp=2")
