"""Model folders: what is refused, and what comes back from what is written."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardloop import hf
from shardloop.errors import ModelError
from shardloop.families import canonical_model
from shardloop.types import Prompt
from tests.models import make_folder, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("qwen3"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def break_nothing_there(folder: Path) -> Path:
    return folder / "absent"


def break_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def break_json(folder: Path) -> Path:
    (folder / "config.json").write_text("{")
    return folder


def break_type(folder: Path) -> Path:
    edit_config(folder, model_type="gpt2")
    return folder


def break_window(folder: Path) -> Path:
    edit_config(folder, use_sliding_window=True)
    return folder


def break_weights(folder: Path) -> Path:
    (folder / hf.WEIGHTS_FILE).unlink()
    return folder


def break_vocabulary(folder: Path) -> Path:
    save_tokenizer(folder, num_letters=31)
    return folder


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (break_nothing_there, "no such folder"),
        (break_config, "no config.json"),
        (break_json, "not valid JSON"),
        (break_type, "model_type='gpt2'.*llama, qwen2, qwen3"),
        (break_window, "use_sliding_window=True"),
        (break_weights, r"no weights; put \*.safetensors"),
        (break_vocabulary, "tokenizer has 34 ids but the model only vocab_size=33"),
    ],
)
def test_an_unusable_folder_is_refused_with_the_reason(tmp_path, break_it, message) -> None:
    folder = break_it(make_folder(tmp_path))
    with pytest.raises(ModelError, match=message):
        hf.load_config(folder)


def test_weights_that_do_not_fit_the_config_are_all_listed(tmp_path) -> None:
    folder = make_folder(tmp_path)
    edit_config(folder, num_hidden_layers=3, intermediate_size=40, layer_types=None)
    with pytest.raises(ModelError) as caught:
        hf.load_model(folder, dtype=torch.float32)
    assert "missing: model.layers.2" in str(caught.value)
    assert "model.layers.1.mlp.down_proj.weight" in str(caught.value)
    with pytest.raises(ModelError, match=r"missing: model\.layers\.2.*shape of .*mlp\.down_proj"):
        hf.load_weights(folder)
    edit_config(folder, num_hidden_layers=1, intermediate_size=48)
    with pytest.raises(ModelError, match=r"unexpected: .*model\.layers\.1\."):
        hf.load_model(folder, dtype=torch.float32)
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.1\."):
        hf.load_weights(folder)


def test_damaged_weights_are_refused(tmp_path) -> None:
    folder = make_folder(tmp_path)
    path = folder / hf.WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be read"):
        hf.load_model(folder, dtype=torch.float32)
    with pytest.raises(ModelError, match="cannot be read"):
        hf.load_weights(folder)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_canonical_model(tmp_path, family, tied) -> None:
    folder = make_folder(tmp_path, family, tied=tied)
    model = hf.load_model(folder, dtype=torch.float32)
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert shapes == canonical_model(hf.load_config(folder)).tensor_shapes()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    weights = hf.load_weights(folder)
    assert weights.keys() == shapes.keys()
    assert all(torch.equal(weights[name], value) for name, value in model.named_parameters())


def test_float64_norms_are_exact(folder) -> None:
    """In float64 the norm is that of float64 numbers: transformers alone rounds it to float32."""
    norm = hf.load_model(folder, dtype=torch.float64).model.norm
    hidden = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scale = (hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    torch.testing.assert_close(norm(hidden), norm.weight * hidden * scale, rtol=1e-15, atol=1e-15)


def test_float32_is_bit_equal_to_transformers(folder) -> None:
    ids = torch.arange(2, 12)[None]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    assert torch.equal(hf.load_model(folder, dtype=torch.float32)(ids).logits, theirs)


def test_written_folder_loads_with_the_same_weights(folder, tmp_path) -> None:
    model = hf.load_model(folder, dtype=torch.float32)
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    config = hf.load_config(folder)
    hf.save_hf_folder(tmp_path, config=config, tensors=tensors, tokenizer_from=folder)
    again = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert hf.load_tokenizer(tmp_path).encode("abc") == hf.load_tokenizer(folder).encode("abc")


def test_interrupted_export_is_no_model(folder, tmp_path, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf.weights, "save_file", fail)
    tensors = {"model.norm.weight": torch.ones(2)}
    with pytest.raises(OSError, match="No space"):
        hf.save_hf_folder(
            tmp_path, config=hf.load_config(folder), tensors=tensors, tokenizer_from=folder
        )
    with pytest.raises(ModelError, match="no weights"):
        hf.load_config(tmp_path)


def test_prompts_are_encoded_once_and_keep_their_special_tokens(folder) -> None:
    tokenizer = hf.load_tokenizer(folder)
    a, b = tokenizer.encode("ab")
    assert tokenizer.vocab_size == 29
    assert tokenizer.encode_prompt(Prompt(uid="1", text="ab")) == [0, a, b]
    messages = ({"role": "user", "content": "a"}, {"role": "user", "content": "b"})
    assert tokenizer.encode_prompt(Prompt(uid="2", messages=messages)) == [0, a, 0, b, 1]
    assert tokenizer.decode([0, a, 1, b]).replace(" ", "") == "ab"


def test_a_bos_that_the_tokenizer_only_names_is_not_put_before_prompts(tmp_path) -> None:
    folder = make_folder(tmp_path)
    save_tokenizer(folder, num_letters=26, writes_bos=False)
    tokenizer = hf.load_tokenizer(folder)
    assert tokenizer.encode_prompt(Prompt(uid="1", text="ab")) == tokenizer.encode("ab")


def test_stops_at_every_eos_of_tokenizer_and_generation_config(tmp_path) -> None:
    folder = make_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    assert hf.load_tokenizer(folder).stop_token_ids == (1, 7)


def test_messages_without_chat_template_are_refused(tmp_path) -> None:
    folder = make_folder(tmp_path)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": None}))
    prompt = Prompt(uid="3", messages=({"role": "user", "content": "a"},))
    with pytest.raises(ModelError, match="no chat template"):
        hf.load_tokenizer(folder).encode_prompt(prompt)
