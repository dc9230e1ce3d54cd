"""Families: names and shapes are those of the Hugging Face models."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardloop.errors import ModelError
from shardloop.families import canonical_model
from shardloop.families.base import MOST_ELEMENTS
from shardloop.families.fp8 import with_block_fp8
from shardloop.families.lora import with_lora
from shardloop.layout.parse import MOST_RANKS
from tests.layout.reference import tiny_config

CONFIGS = [
    tiny_config("llama"),
    tiny_config("llama", attention_bias=True, mlp_bias=True),
    tiny_config("llama", tie_word_embeddings=True, head_dim=6),
    tiny_config("qwen2", head_dim=None),
    tiny_config("qwen2", head_dim=None, tie_word_embeddings=True, num_key_value_heads=4),
    tiny_config("qwen3"),
    tiny_config("qwen3", attention_bias=True, tie_word_embeddings=True, head_dim=6),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
def test_names_and_shapes_are_those_of_the_hugging_face_model(config: dict[str, Any]) -> None:
    given = {key: value for key, value in config.items() if value is not None}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**given))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del expected["lm_head.weight"]
    assert canonical_model(config).tensor_shapes() == expected


def test_tensors_come_layer_by_layer() -> None:
    names = list(canonical_model(tiny_config(num_hidden_layers=11)).tensor_shapes())
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not a known family; choose from llama"),
        ({"model_type": None}, "model_type=None is not a known family"),
        ({"vocab_size": None}, "config.json has no vocab_size; add it"),
        ({"hidden_size": 0}, "config.json: hidden_size=0; it must be a whole number from 1"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers='2'; it must be a whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
        ({"num_attention_heads": True}, "num_attention_heads=True; it must be a whole number"),
        ({"vocab_size": 2**31}, "vocab_size=2147483648; it must be a whole number from 1 to 2147"),
        ({"head_dim": 2.0}, "head_dim=2.0; it must be a whole number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false'; it must be true or false"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings=None; it must be true or false"),
        ({"attention_bias": 1}, "attention_bias=1; it must be true or false"),
        ({"num_attention_heads": 10**30}, "000; it must be a whole number from 1 to 2147483647"),
        ({"hidden_size": [1] * 10**6}, "1, 1]; it must be a whole number"),
        ({"head_dim": None, "hidden_size": 21}, "does not divide hidden_size=21"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        canonical_model({**tiny_config(), **change})
    assert message in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 8},
        {"num_hidden_layers": 2**31 - 1, "intermediate_size": 2**14},
        dict.fromkeys(("vocab_size", "intermediate_size", "num_hidden_layers"), 2**31 - 1),
    ],
)
def test_a_model_whose_bytes_64_bits_cannot_count_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"elements, most of them .*; choose sizes for at most 17"):
        canonical_model({**tiny_config(), **change})


def test_bytes_of_the_largest_model_on_the_most_ranks_fit_64_bits() -> None:
    assert MOST_ELEMENTS * 8 * MOST_RANKS < 2**63


def test_factors_and_scales_are_held_to_the_bounds_of_their_model() -> None:
    model = canonical_model({**tiny_config(), "num_hidden_layers": 2**31 - 1})
    with pytest.raises(ModelError, match="choose sizes for at most"):
        with_lora(model, rank=2**16, targets=["q_proj"])
    for block in (0, 10**18, "128", True):
        with pytest.raises(ModelError, match=rf"block={block!r}; it must be a whole number from 1"):
            with_block_fp8(model, block=block)  # type: ignore[arg-type]
