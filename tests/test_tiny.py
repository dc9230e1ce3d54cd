"""The built-in tiny model: an ordinary folder, decided by its seed, that loses no text."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shardloop import hf
from shardloop.tasks import load_task
from shardloop.tiny import CHARACTERS, CONFIG, build_tiny


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_seed_alone_decides_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = weights(build_tiny(tmp_path / "a", seed=0))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(8)
    again, other = (
        weights(build_tiny(tmp_path / "b", seed=0)),
        weights(build_tiny(tmp_path, seed=1)),
    )
    assert first.keys() == again.keys() == other.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    random_names = [name for name in first if not name.endswith("norm.weight")]
    assert not any(torch.equal(first[name], other[name]) for name in random_names)


def test_transformers_loads_the_folder_as_it_is(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path, seed=0)
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    for name, tensor in weights(folder).items():
        assert torch.equal(model.state_dict()[name], tensor), name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size == CONFIG["vocab_size"]


def test_a_fresh_model_is_close_to_indifferent(tmp_path: Path) -> None:
    model = hf.load_model(build_tiny(tmp_path, seed=0), dtype=torch.float64)
    logprobs = hf.sequence_logprobs(model, [1, 5, 9, 30])
    uniform = -torch.tensor(float(CONFIG["vocab_size"]), dtype=torch.float64).log()
    assert torch.allclose(logprobs, uniform.expand(3), atol=0.8)


def test_any_text_of_known_characters_survives_a_round_trip(tmp_path: Path, seed: int) -> None:
    tokenizer = hf.load_tokenizer(build_tiny(tmp_path, seed=0))
    draw = random.Random(seed)
    texts = [CHARACTERS, " ", "\n\n", "", "  a  b ", " ,", "1 , 2 . "[:5]]
    texts += ["".join(draw.choices(CHARACTERS, k=draw.randrange(30))) for _ in range(50)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([1, *ids, 2]) == text


@pytest.mark.parametrize("text", ["A", "1+1=é", "a\tb", "日"])
def test_an_unknown_character_is_an_error_and_never_dropped(tmp_path: Path, text: str) -> None:
    tokenizer = hf.load_tokenizer(build_tiny(tmp_path, seed=0))
    with pytest.raises(Exception, match=r"UNK|vocabulary"):
        tokenizer.encode(text)


@pytest.mark.parametrize("name", ["sort", "addition", "countdown"])
def test_every_built_in_task_can_be_asked_and_answered(tmp_path: Path, name: str) -> None:
    tokenizer = hf.load_tokenizer(build_tiny(tmp_path, seed=0))
    for prompt in load_task(name).prompts("train", seed=0, start=0, count=100):
        assert prompt.text is not None and prompt.solution is not None
        assert tokenizer.encode_prompt(prompt) == [1, *tokenizer.encode(prompt.text)]
        assert tokenizer.decode(tokenizer.encode(prompt.solution)) == prompt.solution
