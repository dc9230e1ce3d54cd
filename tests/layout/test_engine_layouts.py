"""Engine layouts by example: stacked experts, latents, FP8 scales and LoRA factors."""

import numpy as np
import pytest

from shardloop.families import CanonicalModel
from shardloop.families.fp8 import with_block_fp8
from shardloop.families.lora import lora_adapter, with_lora
from shardloop.layout import make_layout
from tests.families.configs import moe_config
from tests.layout.reference import labels, tiny_model
from tests.layout.test_schemes import from_pieces

LAYER = "model.layers.1."


def moe_model(model_type: str, **changes: object) -> CanonicalModel:
    config = moe_config(model_type, **changes)
    return tiny_model(**config)


@pytest.mark.parametrize(
    "model_type, block, gate, up, down",
    [
        ("qwen3_moe", "mlp", "gate_proj", "up_proj", "down_proj"),
        ("mixtral", "block_sparse_moe", "w1", "w3", "w2"),
    ],
)
def test_experts_are_stacked_with_gate_before_up(
    model_type: str, block: str, gate: str, up: str, down: str
) -> None:
    model = moe_model(model_type)
    full, layout = labels(model), make_layout(model, "engine:tp=2")
    stem = f"{LAYER}{block}.experts."
    each = model.sizes["expert_intermediate"] // 2
    experts = range(model.sizes["experts"])
    for rank in range(2):
        local = from_pieces(layout, rank, full)
        part = slice(each * rank, each * rank + each)
        w13 = [
            np.concatenate([full[f"{stem}{e}.{k}.weight"][part] for k in (gate, up)])
            for e in experts
        ]
        w2 = [full[f"{stem}{e}.{down}.weight"][:, part] for e in experts]
        np.testing.assert_array_equal(local[f"{stem}w13_weight"], np.stack(w13))
        np.testing.assert_array_equal(local[f"{stem}w2_weight"], np.stack(w2))


def test_expert_parallel_ranks_have_whole_experts_and_share_heads_within() -> None:
    """ep=4, tp=2: 4 ranks, two copies of the heads cut in two, one expert each."""
    model = moe_model("qwen3_moe")
    full, layout = labels(model), make_layout(model, "engine:replicas=2,ep=4,tp=2")
    assert layout.world_size == 8
    for rank in range(8):
        local = from_pieces(layout, rank, full)
        gate, up = (
            full[f"{LAYER}mlp.experts.{rank % 4}.{k}.weight"] for k in ("gate_proj", "up_proj")
        )
        np.testing.assert_array_equal(
            local[f"{LAYER}mlp.experts.w13_weight"], np.concatenate([gate, up])[None]
        )
        rows = full[f"{LAYER}self_attn.o_proj.weight"].shape[1] // 2
        columns = slice(rows * (rank % 2), rows * (rank % 2) + rows)
        np.testing.assert_array_equal(
            local[f"{LAYER}self_attn.o_proj.weight"],
            full[f"{LAYER}self_attn.o_proj.weight"][:, columns],
        )


def test_latent_projections_are_fused_and_whole() -> None:
    model = moe_model("deepseek_v3")
    full, layout = labels(model), make_layout(model, "engine:tp=2")
    both = [full[f"{LAYER}self_attn.{k}.weight"] for k in ("q_a_proj", "kv_a_proj_with_mqa")]
    for rank in range(2):
        local = from_pieces(layout, rank, full)
        np.testing.assert_array_equal(
            local[f"{LAYER}self_attn.fused_qkv_a_proj.weight"], np.concatenate(both)
        )
    whole_q = make_layout(moe_model("deepseek_v3", q_lora_rank=None), "engine:tp=2")
    names = whole_q.local_shapes(0)
    assert f"{LAYER}self_attn.kv_a_proj_with_mqa.weight" in names
    assert f"{LAYER}self_attn.q_proj.weight" in names


@pytest.mark.parametrize("scheme", ["", "engine:"])
def test_both_neighbours_hold_the_scale_of_a_block_that_is_cut(scheme: str) -> None:
    """down_proj has 10 columns, 5 on each rank; blocks of 4: 0:4, 4:8, 8:10."""
    model = with_block_fp8(tiny_model(intermediate_size=10), block=4)
    layout = make_layout(model, f"{scheme}tp=2")
    name = f"{LAYER}mlp.down_proj.weight_scale_inv"
    held = [[p.box[1] for p in layout.pieces(r) if p.name == name] for r in range(2)]
    assert held == [[(0, 2)], [(1, 3)]]
    dtypes = layout.local_dtypes(0)
    assert dtypes[name] == "float32"
    assert dtypes[f"{LAYER}mlp.down_proj.weight"] == "float8_e4m3fn"


def test_fused_scales_follow_the_rows_of_their_weights() -> None:
    model = with_block_fp8(tiny_model(intermediate_size=10), block=4)
    full, layout = labels(model), make_layout(model, "engine:tp=2")
    gate, up = (full[f"{LAYER}mlp.{k}_proj.weight_scale_inv"] for k in ("gate", "up"))
    for rank, blocks in ((0, slice(0, 2)), (1, slice(1, 3))):
        local = from_pieces(layout, rank, full)[f"{LAYER}mlp.gate_up_proj.weight_scale_inv"]
        np.testing.assert_array_equal(local, np.concatenate([gate[blocks], up[blocks]]))


def test_lora_factors_are_fused_as_their_weights_are() -> None:
    """A of q, k, v one after the other, whole; B the rank's rows of each."""
    model = with_lora(tiny_model(), rank=3, targets=["q_proj", "k_proj", "v_proj", "o_proj"])
    full, layout = labels(model), make_layout(model, "engine:tp=2")
    a, b = ([full[f"{LAYER}self_attn.{k}_proj.lora_{f}.weight"] for k in "qkv"] for f in ("A", "B"))
    for rank in range(2):
        local = from_pieces(layout, rank, full)
        np.testing.assert_array_equal(
            local[f"{LAYER}self_attn.qkv_proj.lora_A.weight"], np.concatenate(a)
        )
        rows = [np.split(factor, 2)[rank] for factor in b]
        np.testing.assert_array_equal(
            local[f"{LAYER}self_attn.qkv_proj.lora_B.weight"], np.concatenate(rows)
        )
        columns = np.split(full[f"{LAYER}self_attn.o_proj.lora_A.weight"], 2, axis=1)[rank]
        np.testing.assert_array_equal(local[f"{LAYER}self_attn.o_proj.lora_A.weight"], columns)
    adapter = make_layout(lora_adapter(tiny_model(), rank=3, targets=["o_proj"]), "engine:tp=2")
    assert set(adapter.local_shapes(0)) == {n for n in layout.local_shapes(0) if "o_proj.lora" in n}
