"""Laws of binding: every fault of live tensors is named, and nothing else is."""

from dataclasses import replace

import pytest
import torch

from shardloop.errors import PlanError
from shardloop.layout import box_of, make_layout
from shardloop.transport.bind import check_bound
from tests.transport.live import empty, random_state, small_model

NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@pytest.mark.parametrize("spec", ["fsdp=3", "fsdp=2,tp=2", "engine:tp=4", "fsdp=30"])
def test_tensors_of_the_declared_shapes_are_accepted_on_every_rank(spec: str) -> None:
    layout = make_layout(small_model(), spec)
    for rank in range(layout.world_size):
        check_bound(layout, rank, empty(layout, rank, dtype=torch.bfloat16), dtype=torch.bfloat16)


def test_all_faults_are_listed_at_once() -> None:
    layout = make_layout(small_model(), "engine:tp=2")
    tensors = empty(layout, 1, dtype=torch.float32)
    rows, width = tensors[EMBED].shape
    del tensors[NORM]
    tensors["model.extra.weight"] = torch.zeros(3)
    tensors[EMBED] = torch.zeros(rows + 1, width)
    tensors[HEAD] = torch.zeros(width, rows).t()
    tensors["model.layers.1.mlp.down_proj.weight"] = tensors[
        "model.layers.1.mlp.down_proj.weight"
    ].double()
    with pytest.raises(PlanError) as caught:
        check_bound(layout, 1, tensors, dtype=torch.float32)
    message = str(caught.value)
    assert "5 faults" in message
    assert f"missing: {NORM} of shape (24,)" in message
    assert "unexpected: model.extra.weight of shape (3,)" in message
    assert f"shape of {EMBED} is {(rows + 1, width)}, it must be {(rows, width)}" in message
    assert f"strides of {HEAD}" in message
    assert "dtype of model.layers.1.mlp.down_proj.weight is torch.float64" in message


def test_a_source_may_have_any_strides_and_any_floating_dtype_but_no_integers() -> None:
    layout = make_layout(small_model(), "fsdp=1")
    tensors = empty(layout, 0, dtype=torch.float32)
    rows, width = tensors[HEAD].shape
    tensors[HEAD] = torch.zeros(width, rows).t()
    tensors[NORM] = tensors[NORM].bfloat16()
    check_bound(layout, 0, tensors, strides="any")
    tensors[NORM] = tensors[NORM].int()
    with pytest.raises(PlanError, match=f"dtype of {NORM} is torch.int32"):
        check_bound(layout, 0, tensors, strides="any")


def test_a_rank_without_elements_may_leave_out_its_empty_shards() -> None:
    layout = make_layout(
        small_model(), "fsdp=30"
    )  # 24 rows at one a rank: the last ranks have none
    full = empty(layout, 29, dtype=torch.float32)
    check_bound(layout, 29, {name: t for name, t in full.items() if t.numel()})
    assert any(t.numel() == 0 for t in full.values())


def test_pieces_of_all_ranks_rebuild_the_model() -> None:
    model = small_model()
    state = random_state(model)
    layout = make_layout(model, "fsdp=3")
    rebuilt = {name: torch.full_like(t, torch.nan) for name, t in state.items()}
    for rank in range(3):
        for piece in layout.pieces(rank):
            local = torch.zeros(layout.local_shapes(rank)[piece.local_name])
            piece.of({piece.local_name: local}).copy_(box_of(state[piece.name], piece.box))
            box_of(rebuilt[piece.name], piece.box).copy_(piece.of({piece.local_name: local}))
    assert all(torch.equal(rebuilt[name], state[name]) for name in state)


def test_a_declared_dtype_goes_before_the_one_asked_for() -> None:
    """And nothing is turned into 8 bits on the way: a source must have them."""
    model = small_model()
    declared = {"mlp.down_proj.weight": "float8_e4m3fn", "input_layernorm.weight": "float32"}
    classes = tuple(replace(c, dtype=declared.get(c.key)) for c in model.classes)
    layout = make_layout(replace(model, classes=classes), "fsdp=2")
    tensors = empty(layout, 0, dtype=torch.bfloat16)
    check_bound(layout, 0, tensors, dtype=torch.bfloat16)
    check_bound(layout, 0, tensors)
    plain = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    with pytest.raises(PlanError, match="4 faults") as caught:
        check_bound(layout, 0, plain, dtype=torch.bfloat16)
    assert "input_layernorm.weight is torch.bfloat16, it must be torch.float32" in str(caught.value)
    with pytest.raises(PlanError, match="2 faults") as caught:
        check_bound(layout, 0, plain)
    assert "down_proj.weight is torch.bfloat16, it must be torch.float8_e4m3fn" in str(caught.value)
