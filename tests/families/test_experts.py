"""Families with experts: names and shapes are those of the checkpoints that transformers writes."""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from shardloop import hf
from shardloop.errors import ModelError
from shardloop.families import CanonicalModel, canonical_model
from shardloop.families.base import by_name
from shardloop.model import DecoderConfig
from tests.families.configs import moe_config

CONFIGS = {
    "qwen3_moe": moe_config("qwen3_moe"),
    "qwen3_moe biased tied": moe_config(
        "qwen3_moe", attention_bias=True, tie_word_embeddings=True, head_dim=6
    ),
    "mixtral": moe_config("mixtral"),
    "mixtral head_dim": moe_config("mixtral", head_dim=6, num_key_value_heads=4),
    "deepseek_v3": moe_config("deepseek_v3"),
    "deepseek_v3 q whole": moe_config("deepseek_v3", q_lora_rank=None),
    "deepseek_v3 no dense layer": moe_config("deepseek_v3", first_k_dense_replace=0),
    "deepseek_v3 dense alone": moe_config("deepseek_v3", first_k_dense_replace=3),
}


def save(config: dict[str, Any], folder: Path) -> Path:
    given = {k: v for k, v in config.items() if v is not None or k == "q_lora_rank"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**given)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CONFIGS)
def test_names_and_shapes_are_those_of_the_saved_checkpoint(tmp_path: Path, case: str) -> None:
    folder = save(CONFIGS[case], tmp_path)
    with safe_open(folder / "model.safetensors", framework="np") as file:
        names = file.keys()
        expected = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    saved = json.loads((folder / "config.json").read_text())
    for config in (CONFIGS[case], saved):
        assert canonical_model(config).tensor_shapes() == expected


def test_kimi_k2_has_the_tensors_of_deepseek_v3() -> None:
    config = moe_config("deepseek_v3")
    kimi = canonical_model({**config, "model_type": "kimi_k2"})
    assert kimi.classes == canonical_model(config).classes


def test_the_layer_for_several_tokens_is_left_out() -> None:
    config = moe_config("deepseek_v3")
    assert canonical_model({**config, "num_nextn_predict_layers": 1}) == canonical_model(config)


def test_only_the_routers_bias_is_kept_in_float32() -> None:
    model = canonical_model(moe_config("deepseek_v3"))
    kept = {name: c.dtype for name, c in by_name(model.classes) if c.dtype is not None}
    bias = "model.layers.{}.mlp.gate.e_score_correction_bias"
    assert kept == {bias.format(1): "float32", bias.format(2): "float32"}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_meaning_has_one_size_and_whole_units(case: str) -> None:
    model = canonical_model(CONFIGS[case])
    dims = {dim for c in model.classes for dim in c.dims}
    assert {dim.meaning: dim.size for dim in dims} == model.sizes
    assert len(dims) == len(model.sizes)
    assert all(model.sizes[meaning] % parts == 0 for meaning, parts in model.units.items())
    assert model.units.keys() == model.sizes.keys()


def test_what_belongs_to_a_head_is_not_to_be_cut() -> None:
    model = canonical_model(moe_config("deepseek_v3", num_attention_heads=4))
    units = {m: model.units[m] for m in ("q", "mla_kv", "mla_v", "shared_intermediate")}
    assert units == {"q": 4, "mla_kv": 4, "mla_v": 4, "shared_intermediate": 12}
    assert canonical_model(moe_config("qwen3_moe")).units["kv"] == 2


def counted(model: CanonicalModel) -> int:
    return sum(prod(shape) for shape in model.tensor_shapes().values())


@pytest.mark.parametrize("case", CONFIGS)
def test_parameters_and_bytes_are_those_of_the_tensors_one_by_one(case: str) -> None:
    model = canonical_model(CONFIGS[case])
    kept = sum(prod(shape) for name, shape in model.tensor_shapes().items() if "correction" in name)
    assert model.num_parameters == counted(model)
    assert model.num_bytes(2) == 2 * (counted(model) - kept) + 4 * kept


@pytest.mark.parametrize(
    ("model_type", "change", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported; choose"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers=[0] is not supported; choose []"),
        ("qwen3_moe", {"num_experts": None}, "config.json has no num_experts; add it"),
        ("qwen3_moe", {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts=0; it must be a whole number"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported; choose 1"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' is not supported; choose"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias=True is not supported; choose"),
        ("deepseek_v3", {"n_shared_experts": None}, "config.json has no n_shared_experts"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank=0; it must be a whole number"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace=-1; it must be a"),
    ],
)
def test_what_a_table_cannot_say_is_refused(
    model_type: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as error:
        canonical_model(moe_config(model_type, **change))
    assert message in str(error.value)


def test_a_missing_rank_of_q_is_not_taken_for_null() -> None:
    config = moe_config("deepseek_v3")
    del config["q_lora_rank"]
    with pytest.raises(ModelError, match="has no q_lora_rank; add it, null where"):
        canonical_model(config)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_family_that_is_only_planned_is_not_run(tmp_path: Path, model_type: str) -> None:
    config = moe_config(model_type)
    message = (
        f"model_type='{model_type}' is a family that can be planned, resharded and converted but "
        "neither trained nor run here; choose a model of type llama, qwen2, qwen3"
    )
    with pytest.raises(ModelError) as error:
        DecoderConfig.from_hf(config)
    assert message in str(error.value)
    with pytest.raises(ModelError) as error:
        hf.load_config(save(config, tmp_path))
    assert message in str(error.value)
