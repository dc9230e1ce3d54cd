"""The plan as data: what it refuses, what it prints, and that it is the same anywhere."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardloop.errors import PlanError
from shardloop.families import canonical_model
from shardloop.families.base import LAYER_PREFIX, Dim, TensorClass
from shardloop.layout import make_layout
from shardloop.reshard.inprocess import execute_inprocess
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import verify
from tests.layout.reference import LARGE, labels, tiny_model
from tests.reshard.simulate import (
    assert_same,
    empty_tensors,
    expected_tensors,
    planned,
    resharded,
    source_tensors,
)

ROOT = Path(__file__).resolve().parents[2]


def test_names_that_only_one_side_has_are_all_listed_for_both_sides() -> None:
    src = make_layout(tiny_model("qwen2"), "fsdp=2")
    dst = make_layout(tiny_model("qwen3", tie_word_embeddings=True), "engine:tp=2")
    with pytest.raises(PlanError) as error:
        plan_reshard(src, dst)
    here, there = src.model.tensor_shapes(), dst.model.tensor_shapes()
    first, second = str(error.value).split("only in the destination")
    assert {n for n in here if f"    {n}\n" in first} == {*here} - {*there} != set()
    assert {n for n in there if f"    {n}" in second.splitlines()} == {*there} - {*here} != set()


def test_one_unknown_parameter_is_named() -> None:
    model = tiny_model()
    extra = TensorClass(
        key="self_attn.gate.weight",
        template=LAYER_PREFIX + "self_attn.gate.weight",
        layers=(0, model.num_layers),
        dims=(Dim("hidden", 3),),
    )
    larger = replace(model, classes=(*model.classes, extra))
    for src, dst, side in ((model, larger, "destination"), (larger, model, "source")):
        with pytest.raises(PlanError) as error:
            plan_reshard(make_layout(src, "fsdp=2"), make_layout(dst, "engine:tp=2"))
        assert f"only in the {side} (2):" in str(error.value)
        for layer in range(2):
            assert f"    model.layers.{layer}.self_attn.gate.weight" in str(error.value)


def test_shapes_that_differ_are_listed() -> None:
    a, b = tiny_model(vocab_size=10), tiny_model(vocab_size=11)
    with pytest.raises(PlanError) as error:
        plan_reshard(make_layout(a, "fsdp=2"), make_layout(b, "fsdp=2"))
    assert "of different shapes (2):" in str(error.value)
    assert "model.embed_tokens.weight (10, 20) -> (11, 20)" in str(error.value)


def test_equal_shapes_with_other_heads_are_refused() -> None:
    a = tiny_model(num_attention_heads=4, num_key_value_heads=2, head_dim=2)
    b = tiny_model(num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    assert a.tensor_shapes() == b.tensor_shapes()
    with pytest.raises(PlanError, match="head_dim 2 -> 4"):
        plan_reshard(make_layout(a, "fsdp=2"), make_layout(b, "engine:tp=1"))


@pytest.mark.parametrize("ranks", [[0], [0, 0], [0, 1, 2], [-1, 0]])
def test_ranks_that_do_not_fit_the_layout_are_refused(ranks: list[int]) -> None:
    model = tiny_model()
    for side in ("src_ranks", "dst_ranks"):
        with pytest.raises(PlanError) as error:
            planned(model, "fsdp=2", "tp=2", **{side: ranks})
        assert f"{side}={ranks} does not fit layout" in str(error.value)
        assert "give 2 different ranks >= 0" in str(error.value)


@pytest.mark.parametrize(
    ("lost", "fault"),
    [([5], r"lost=\[5\] are not in src_ranks"), ([1], r"lost=\[1\] are in dst_ranks")],
)
def test_lost_ranks_that_hold_nothing_or_receive_are_refused(lost: list[int], fault: str) -> None:
    with pytest.raises(PlanError, match=fault):
        planned(tiny_model(), "dp=2", "tp=2", dst_ranks=[1, 2], lost=lost)


def test_a_rank_that_is_lost_twice_is_lost_once() -> None:
    model, route = tiny_model(), ("dp=4", "engine:replicas=5")
    once, twice = planned(model, *route, lost=[2]), planned(model, *route, lost=[2, 2])
    assert once.digest == twice.digest


def test_lost_ranks_have_no_tensors_to_give() -> None:
    plan = planned(tiny_model(), "dp=3", "engine:tp=2", lost=[1])
    full, dst = labels(plan.src.model), empty_tensors(plan)
    src = source_tensors(plan, full)
    with pytest.raises(PlanError, match="source rank 1 is not in the layout, or is lost"):
        execute_inprocess(verify(plan), src, dst)
    del src[1]
    execute_inprocess(verify(plan), src, dst)
    assert_same(dst, expected_tensors(plan, full))


def test_what_no_living_rank_holds_is_named_by_class_layers_and_ranks() -> None:
    with pytest.raises(PlanError) as error:
        planned(tiny_model(num_hidden_layers=4), "pp=2,tp=2", "engine:tp=2", lost=[3])
    text = str(error.value)
    assert "with ranks 3 lost, no rank holds all of these tensors" in text
    assert "mlp.gate_proj.weight, layers 2-3: only on ranks 3" in text
    assert "norm" not in text and "layers 0" not in text and len(text.splitlines()) < 12


def test_many_differing_names_are_summed_up() -> None:
    models = tiny_model("llama", num_hidden_layers=9), tiny_model("qwen3", num_hidden_layers=11)
    with pytest.raises(PlanError) as error:
        plan_reshard(*(make_layout(model, "fsdp=2") for model in models))
    assert "    and " in str(error.value) and len(str(error.value).splitlines()) < 30


def test_kept_dtypes_that_differ_are_named() -> None:
    model = tiny_model()
    classes = tuple(
        replace(c, dtype="float32") if c.key == "input_layernorm.weight" else c
        for c in model.classes
    )
    other = replace(model, classes=classes)
    with pytest.raises(PlanError, match=r"of different dtypes \(2\)") as error:
        plan_reshard(make_layout(model, "fsdp=2"), make_layout(other, "fsdp=2"))
    assert "layers.1.input_layernorm.weight the model's -> float32" in str(error.value)
    plan = plan_reshard(make_layout(other, "fsdp=2"), make_layout(other, "engine:tp=2"))
    found = {t.name: t.dtype for t in plan.receives(2)}
    assert {name for name, dtype in found.items() if dtype == "float32"} == {
        f"model.layers.{layer}.input_layernorm.weight" for layer in range(2)
    }


def test_ranks_outside_the_plan_have_nothing_to_do() -> None:
    plan = planned(tiny_model(), "fsdp=2", "engine:tp=2", src_ranks=[4, 2], dst_ranks=[7, 2])
    assert plan.ranks == (2, 4, 7)
    assert plan.sends(3) == plan.receives(3) == plan.receives(4) == plan.sends(7) == []


def test_padding_does_not_leak_into_an_export() -> None:
    model = tiny_model(vocab_size=10)
    full, plan = labels(model), planned(model, "engine:tp=4", "fsdp=1")
    src = source_tensors(plan, full)
    for tensors in src.values():
        for tensor in tensors.values():
            tensor[tensor == 0] = -1
    dst = empty_tensors(plan)
    execute_inprocess(verify(plan), src, dst)
    for name, tensor in full.items():
        np.testing.assert_array_equal(dst[4][name], tensor)
    assert dst[4]["lm_head.weight"].shape[0] == 10


def test_tied_head_arrives_with_the_embedding_alone() -> None:
    model = tiny_model(tie_word_embeddings=True, vocab_size=8)
    full, plan = labels(model), planned(model, "fsdp=3", "engine:tp=2")
    arrived = resharded(plan, full)
    rows = np.concatenate([arrived[r]["model.embed_tokens.weight"] for r in plan.dst_ranks])
    np.testing.assert_array_equal(rows, full["model.embed_tokens.weight"])
    assert sum("embed_tokens" in flow.key for flow in plan.flows) == 1


@pytest.mark.parametrize("back", ["fsdp=1", "fsdp=3", "megatron:tp=2"])
def test_copied_kv_heads_are_not_counted_again_on_the_way_back(back: str) -> None:
    """2 kv heads of 3 rows: 4 ranks have one head each, 12 rows in all, and 6 go back."""
    model = tiny_model(num_attention_heads=8, num_key_value_heads=2, head_dim=3)
    full, there = labels(model), planned(model, "fsdp=1", "engine:tp=4")
    held = resharded(there, full)
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    assert [tensors[fused].shape[0] for tensors in held.values()] == [2 * 3 + 3 + 3] * 4
    plan = plan_reshard(there.dst, make_layout(model, back), src_ranks=there.dst_ranks)
    dst = empty_tensors(plan)
    execute_inprocess(verify(plan), held, dst)
    assert_same(dst, expected_tensors(plan, full))
    moved = [
        t for rank in plan.dst_ranks for t in plan.receives(rank) if "0.self_attn.k_" in t.name
    ]
    assert sum(t.num_elements for t in moved) == full["model.layers.0.self_attn.k_proj.weight"].size


def test_local_shapes_that_do_not_fit_are_all_listed() -> None:
    plan = planned(tiny_model(), "fsdp=2", "engine:tp=2")
    src, dst = source_tensors(plan, labels(plan.src.model)), empty_tensors(plan)
    del src[1]["model.norm.weight"]
    src[9] = {}
    dst[2]["spare"] = np.zeros(1)
    dst[3]["model.norm.weight"] = np.zeros(3)
    with pytest.raises(PlanError) as error:
        execute_inprocess(verify(plan), src, dst)
    for fault in (
        "source rank 1: missing: model.norm.weight of shape (10,)",
        "source rank 9 is not in the layout",
        "destination rank 2: unexpected: spare of shape (1,)",
        "destination rank 3: shape of model.norm.weight is (3,), it must be (20,)",
    ):
        assert fault in str(error.value)


def test_every_process_makes_the_same_plan_and_the_same_lists() -> None:
    program = (
        "from tests.layout.reference import tiny_model\n"
        "from tests.reshard.simulate import planned\n"
        "plan = planned(tiny_model('qwen3'), 'dp=2,fsdp=3', 'engine:tp=4')\n"
        "print(plan.digest, [plan.sends(rank) + plan.receives(rank) for rank in plan.ranks])"
    )
    printed = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", program]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
        )
        printed.add(done.stdout)
    assert len(printed) == 1


def test_digest_tells_plans_apart() -> None:
    model = tiny_model()
    plans = [
        planned(model, "fsdp=2", "engine:tp=2"),
        planned(model, "fsdp=2", "engine:tp=2", src_ranks=[1, 0]),
        planned(model, "fsdp=2", "engine:tp=2", dst_ranks=[3, 2]),
        planned(model, "tp=2", "engine:tp=2"),
        planned(model, "fsdp=2", "tp=2"),
        planned(tiny_model(vocab_size=11), "fsdp=2", "engine:tp=2"),
        planned(tiny_model(num_hidden_layers=3), "fsdp=2", "engine:tp=2"),
    ]
    assert len({plan.digest for plan in plans}) == len(plans)


def test_a_pickled_plan_is_the_same_plan() -> None:
    plan = planned(tiny_model(), "dp=2,fsdp=2", "engine:tp=4", dst_ranks=[0, 1, 2, 3])
    again = pickle.loads(pickle.dumps(plan))
    assert again.digest == plan.digest
    verify(again)
    for rank in plan.ranks:
        assert again.sends(rank) == plan.sends(rank)
        assert again.receives(rank) == plan.receives(rank)


def test_summary_is_json() -> None:
    plan = planned(tiny_model(), "fsdp=2", "engine:tp=2")
    summary = json.loads(json.dumps(plan.summary()))
    assert summary["src"] == "fsdp=2" and summary["dst_ranks"] == [2, 3]
    assert summary["digest"] == plan.digest
    assert {flow["key"] for flow in summary["flows"]} == set(plan.src.model.class_of)


def test_equal_cuts_share_their_joins_whatever_the_number_of_layers() -> None:
    def joins(num_layers: int) -> int:
        model = canonical_model({**LARGE, "num_hidden_layers": num_layers})
        plan = plan_reshard(make_layout(model, "fsdp=64"), make_layout(model, "engine:tp=8"))
        return len({id(step) for flow in plan.flows for step in flow.joins})

    assert joins(80) == joins(8) < 20


def test_replanning_after_a_loss_meets_no_tables_anew() -> None:
    model = tiny_model()
    layouts = make_layout(model, "dp=2,fsdp=2"), make_layout(model, "engine:tp=2")
    first, again = plan_reshard(*layouts), plan_reshard(*layouts, lost=[1])
    assert again.digest != first.digest
    for old, new in zip(first.flows, again.flows, strict=True):
        assert all(a is b for a, b in zip(old.joins, new.joins, strict=True))
