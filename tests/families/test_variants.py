"""LoRA factors and FP8 scales are classes like any other."""

import random
from math import prod
from typing import Any

import numpy as np
import pytest

from shardloop.errors import ModelError
from shardloop.families import CanonicalModel, canonical_model
from shardloop.families.base import by_name
from shardloop.families.fp8 import with_block_fp8
from shardloop.families.lora import lora_adapter, with_lora
from shardloop.families.public import public_model
from tests.families.configs import moe_config
from tests.layout.reference import tiny_config

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODELS = {
    "llama": tiny_config("llama"),
    **{name: moe_config(name) for name in ("qwen3_moe", "mixtral", "deepseek_v3")},
}


def model_of(name: str) -> CanonicalModel:
    return canonical_model(MODELS[name])


def linear_names(model: CanonicalModel) -> set[str]:
    """Matrices within the layers that are not the router's, by their names alone."""
    return {
        name
        for name, shape in model.tensor_shapes().items()
        if len(shape) == 2 and ".layers." in name and not name.endswith(".gate.weight")
    }


def test_the_factors_of_a_weight_have_the_names_and_shapes_of_its_adapter() -> None:
    config = tiny_config(hidden_size=20, intermediate_size=8)
    shapes = lora_adapter(canonical_model(config), rank=3, targets=["q_proj", "down_proj"])
    layer = "model.layers.{}."
    assert shapes.tensor_shapes() == {
        layer.format(n) + name: shape
        for n in range(2)
        for name, shape in {
            "self_attn.q_proj.lora_A.weight": (3, 20),
            "self_attn.q_proj.lora_B.weight": (8, 3),
            "mlp.down_proj.lora_A.weight": (3, 8),
            "mlp.down_proj.lora_B.weight": (20, 3),
        }.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_the_product_of_the_factors_is_cut_as_their_weight(name: str) -> None:
    model = model_of(name)
    modules = list(dict.fromkeys(n.split(".")[-2] for n in sorted(linear_names(model))))
    class_of = dict(by_name(with_lora(model, rank=3, targets=modules).classes))
    assert len(class_of) == len(model.tensor_shapes()) + 2 * len(linear_names(model))
    for weight in linear_names(model):
        stem = weight.removesuffix("weight")
        a, b = class_of[stem + "lora_A.weight"].dims, class_of[stem + "lora_B.weight"].dims
        assert (b[0], a[1]) == class_of[weight].dims
        assert a[0] == b[1] == ("lora_rank", 3, 1)


def test_the_base_stays_as_it_was_and_the_adapter_is_the_rest() -> None:
    model = model_of("deepseek_v3")
    both = with_lora(model, rank=2, targets=["kv_b_proj", "up_proj"])
    adapter = lora_adapter(model, rank=2, targets=["kv_b_proj", "up_proj"])
    assert both.classes == (*model.classes, *adapter.classes)
    assert both.units["lora_rank"] == both.sizes["lora_rank"] == 2


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [("Qwen3-4B", 32, 66_060_288), ("Qwen3-30B-A3B", 16, 843_841_536)],
)
def test_adapters_have_as_many_parameters_as_published_ones(
    name: str, rank: int, expected: int
) -> None:
    model = canonical_model(public_model(name))
    assert lora_adapter(model, rank=rank, targets=LINEAR).num_parameters == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "rank=0; choose a rank from 1 to 65536"),
        ({"rank": 10**18}, "rank=1000000000000000000; choose a rank from 1 to 65536"),
        ({"targets": []}, "no targets; choose some of q_proj, k_proj, v_proj, o_proj, gate_proj"),
        ({"targets": ["q"]}, "target 'q' is no linear layer of model llama; choose from q_proj, k"),
        ({"targets": ["lm_head", "norm"], "rank": -1}, "target 'norm' is no linear layer"),
        ({"targets": ["lm_head", "norm"], "rank": -1}, "rank=-1; choose a rank from 1 to 65536"),
    ],
)
def test_a_wrong_adapter_is_refused_with_all_its_faults(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as error:
        with_lora(model_of("llama"), **{"rank": 2, "targets": ["q_proj"], **changes})
    assert message in str(error.value)


def test_factors_are_not_added_twice() -> None:
    once = with_lora(model_of("llama"), rank=2, targets=["q_proj"])
    with pytest.raises(ModelError, match="llama has LoRA factors already"):
        with_lora(once, rank=2, targets=["k_proj"])


@pytest.mark.parametrize("name", MODELS)
def test_linear_weights_alone_are_quantised(name: str) -> None:
    model = model_of(name)
    of = {n: c.dtype for n, c in by_name(with_block_fp8(model).classes)}
    assert {n for n, dtype in of.items() if dtype == "float8_e4m3fn"} == linear_names(model)
    scales = {n + "_scale_inv" for n in linear_names(model)}
    assert of.keys() == model.tensor_shapes().keys() | scales
    assert {of[n] for n in scales} == {"float32"}


@pytest.mark.parametrize("seed", range(20))
def test_every_element_of_a_weight_has_one_scale(seed: int) -> None:
    rng = random.Random(seed)
    block = rng.randint(1, 9)
    config = tiny_config(hidden_size=rng.randint(1, 40), intermediate_size=rng.randint(1, 40))
    model = with_block_fp8(canonical_model(config), block=block)
    shapes = model.tensor_shapes()
    for name in linear_names(canonical_model(config)):
        rows, columns = shapes[name]
        touched = np.zeros(shapes[name + "_scale_inv"], dtype=int)
        for i in range(rows):
            for j in range(columns):
                touched[i // block, j // block] += 1
        assert touched.all() and touched.sum() == rows * columns


@pytest.mark.parametrize("name", MODELS)
def test_a_scale_means_what_its_weight_means(name: str) -> None:
    model = with_block_fp8(model_of(name), block=4)
    for c in model.classes:
        if c.dtype == "float8_e4m3fn":
            scale = model.class_of[c.key + "_scale_inv"]
            assert [dim.meaning for dim in scale.dims] == [dim.meaning for dim in c.dims]
            assert {dim.block for dim in scale.dims} == {4}
            assert (scale.layers, scale.experts) == (c.layers, c.experts)


def test_bytes_in_fp8_are_those_of_the_tensors_one_by_one() -> None:
    model = with_block_fp8(model_of("deepseek_v3"))
    weights = linear_names(model_of("deepseek_v3"))

    def itemsize(name: str) -> int:
        in_float32 = name.endswith(("_scale_inv", "correction_bias"))
        return 1 if name in weights else 4 if in_float32 else 2

    expected = sum(prod(shape) * itemsize(name) for name, shape in model.tensor_shapes().items())
    assert model.num_bytes(2) == expected


def test_an_adapter_on_an_fp8_model_is_not_quantised_and_neither_are_its_factors() -> None:
    fp8 = with_block_fp8(model_of("llama"))
    quantised_first = with_lora(fp8, rank=2, targets=["q_proj"])
    adapted_first = with_block_fp8(with_lora(model_of("llama"), rank=2, targets=["q_proj"]))
    assert set(quantised_first.classes) == set(adapted_first.classes)
    factors = [c for c in adapted_first.classes if ".lora_" in c.key]
    assert [c.dtype for c in factors] == [None, None]


def test_what_cannot_be_quantised_is_refused() -> None:
    model = model_of("llama")
    with pytest.raises(ModelError, match="block=0; it must be a whole number from 1 to"):
        with_block_fp8(model, block=0)
    with pytest.raises(ModelError, match="llama is in FP8 already"):
        with_block_fp8(with_block_fp8(model))
