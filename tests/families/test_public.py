"""The public models have the numbers of parameters and of tensors that are known of them."""

import pytest

from shardloop.errors import ModelError
from shardloop.families import canonical_model
from shardloop.families.public import PUBLIC, public_model

PARAMETERS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "SmolLM2-135M": 134_515_008,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "Mixtral-8x7B": 46_702_792_704,
    "DeepSeek-V3": 671_026_419_200,
    "Kimi-K2": 1_026_408_232_448,
}
TENSORS = {
    "Llama-3-70B": 723,
    "Qwen3-235B-A22B": 36_945,
    "DeepSeek-V3": 45_395,
    "Kimi-K2": 69_975,
}


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_are_as_published(name: str) -> None:
    assert canonical_model(public_model(name)).num_parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_few_classes(name: str) -> None:
    model = canonical_model(public_model(name))
    assert len(model.tensor_shapes()) == TENSORS[name]
    assert len(model.classes) <= 23


def test_names_are_taken_in_any_case() -> None:
    assert public_model("deepseek-v3") == public_model("DeepSeek-V3") == PUBLIC["DeepSeek-V3"]


def test_the_caller_may_change_its_config() -> None:
    public_model("Qwen3-8B")["num_hidden_layers"] = 1
    assert public_model("Qwen3-8B")["num_hidden_layers"] == 36


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("qwen3-235b", "did you mean Qwen3-235B-A22B? choose from Llama-3.1-8B, "),
        ("DeepSeekV3", "did you mean DeepSeek-V3? choose from"),
        ("x", "model 'x' is not known; choose from Llama-3.1-8B, Llama-3-70B, "),
    ],
)
def test_an_unknown_name_lists_the_known_and_suggests_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ModelError) as error:
        public_model(name)
    assert hint in str(error.value)
