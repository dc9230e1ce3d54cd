"""Model folders: what is refused, and what comes back from what is written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shardloop import hf
from shardloop.errors import ModelError, TaskError
from shardloop.families import canonical_model
from shardloop.hf.headers import INDEX_FILE
from shardloop.tiny import build_tiny
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
        (break_weights, "no weights; put model.safetensors"),
        (break_vocabulary, "tokenizer has 34 ids but the model only vocab_size=33"),
    ],
)
def test_an_unusable_folder_is_refused_with_the_reason(tmp_path, break_it, message) -> None:
    folder = break_it(make_folder(tmp_path))
    with pytest.raises(ModelError, match=message):
        hf.load_config(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json: the tokenizer cannot be read: Exception: Model"),
        ("tokenizer.json", '{"model": null}', "tokenizer.json: the tokenizer cannot be read"),
        ("tokenizer.json", '{"model": {"vocab": {"a": "x"}}, "added_tokens": [{}]}', "be read"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: holds list, not a JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", '{"eos_token": 3}', "the tokenizer cannot be read"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id='2'; .* 0 to 32, or a"),
        ("generation_config.json", '{"eos_token_id": 2.5}', "generation_config.json: eos_.*=2.5;"),
        ("generation_config.json", '{"eos_token_id": [1, 33]}', r"eos_token_id=\[1, 33\]; it must"),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id=True; it must be a"),
    ],
)
def test_tokenizer_files_of_another_kind_are_named(tmp_path, name, content, message) -> None:
    folder = make_folder(tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        hf.load_config(folder) and hf.load_tokenizer(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "foo"}, "dtype='foo' is not supported; choose float32"),
        ({"torch_dtype": 16}, "torch_dtype=16 is not supported"),
        ({"eos_token_id": 33}, "eos_token_id=33; it must be a token id from 0 to 32"),
        ({"eos_token_id": "1"}, "eos_token_id='1'"),
        ({"pad_token_id": 99}, "pad_token_id=99; it must be a whole number from -1 to 32"),
        ({"rms_norm_eps": 1}, "transformers refuses it: StrictDataclass.*'rms_norm_eps' expected"),
        ({"max_position_embeddings": 64.0}, "max_position_embeddings=64.0; it must be a whole"),
        ({"quantization_config": {}}, "quantization_config={} is not supported"),
    ],
)
def test_a_field_of_another_kind_is_named_with_its_value(tmp_path, change, message) -> None:
    folder = make_folder(tmp_path)
    edit_config(folder, **change)
    with pytest.raises(ModelError, match=message) as caught:
        hf.load_config(folder)
    assert str(caught.value).startswith(str(folder))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Other tensors for some names; None leaves the name out."""
    path = folder / hf.WEIGHTS_FILE
    tensors = {**load_file(path), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: None}, r"missing: model\.norm\.weight of shape \(32,\)"),
        ({"adapter": torch.ones(2)}, r"unexpected: adapter of shape \(2,\)"),
        ({NORM: torch.ones(3)}, r"shape of model\.norm\.weight is \(3,\), it must be \(32,\)"),
        ({NORM: torch.ones(32, dtype=torch.int8)}, r"dtype of model\.norm\.weight is I8, it must"),
        ({HEAD: torch.ones(33, 32)}, "lm_head.weight is there and differs from model.embed_tokens"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_their_headers(tmp_path, changes, message) -> None:
    folder = make_folder(tmp_path)
    rewrite(folder, **changes)
    with pytest.raises(ModelError, match=message):
        hf.load_config(folder)


def test_the_alias_of_a_tied_head_may_be_there(tmp_path) -> None:
    folder = make_folder(tmp_path)
    rewrite(folder, **{HEAD: hf.load_weights(folder)[EMBEDDING].clone()})
    assert HEAD not in hf.load_weights(folder)
    model = hf.load_model(folder, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def split_in_two(folder: Path) -> dict[str, str]:
    """The weights in two files, as the index says that is written beside them."""
    tensors = load_file(folder / hf.WEIGHTS_FILE)
    (folder / hf.WEIGHTS_FILE).unlink()
    weight_map = {name: f"{'ab'[i % 2]}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in ("a.safetensors", "b.safetensors"):
        part = {name: tensors[name] for name in tensors if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_weights_in_parts_are_those_in_one(folder, tmp_path) -> None:
    parts = make_folder(tmp_path)
    split_in_two(parts)
    # As transformers: files that the index does not name are not read.
    save_file({"adapter": torch.ones(2)}, parts / "adapter.safetensors")
    whole, joined = hf.load_weights(folder), hf.load_weights(parts)
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[name], whole[name]) for name in whole)
    loaded = dict(hf.load_model(parts, dtype=torch.float32).named_parameters())
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "no weights; put model.safetensors, or its parts with"),
        ({}, "weight_map must give a file"),
        ({"weight_map": {"x": "../x.safetensors"}}, "weight_map must give a file"),
        ({"weight_map": {"x": "a.safetensors"}}, "no object metadata"),
        ({"metadata": {}, "weight_map": {"x": "c.safetensors"}}, "no c.safetensors, named by"),
        ({"metadata": {}, "weight_map": {"x": "a.safetensors"}}, "missing: "),
    ],
)
def test_an_index_that_does_not_lead_to_the_weights_is_refused(tmp_path, index, message) -> None:
    folder = make_folder(tmp_path)
    split_in_two(folder)
    (folder / INDEX_FILE).unlink()
    if index is not None:
        (folder / INDEX_FILE).write_text(json.dumps(index))
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
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1, "weights are as readable as the files beside them"
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert hf.load_tokenizer(tmp_path).encode("abc") == hf.load_tokenizer(folder).encode("abc")


def test_interrupted_export_is_no_model(folder, tmp_path, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf.shards, "write_file", fail)
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


def test_stops_at_every_eos_of_tokenizer_generation_config_and_config(tmp_path) -> None:
    folder = make_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    edit_config(folder, eos_token_id=[9, 7])
    assert hf.load_tokenizer(folder).stop_token_ids == (1, 7, 9)


def edit_tokenizer(folder: Path, **changes: object) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ bad", "TemplateSyntaxError"),
        ("{{ raise_exception('no system') }}", "TemplateError: no system"),
        ("{{ messages[0].foo.bar }}", "UndefinedError"),
    ],
)
def test_a_chat_template_that_fails_is_named_with_the_prompt(tmp_path, template, message) -> None:
    folder = make_folder(tmp_path)
    edit_tokenizer(folder, chat_template=template)
    prompt = Prompt(uid="3", messages=({"role": "user", "content": "a"},))
    with pytest.raises(ModelError, match=rf"template fails on prompt '3' \('a'\): {message}"):
        hf.load_tokenizer(folder).encode_prompt(prompt)


def test_a_character_outside_the_vocabulary_is_named(tmp_path) -> None:
    tokenizer = hf.load_tokenizer(build_tiny(tmp_path, seed=0))
    with pytest.raises(TaskError, match=r"text '1é2' cannot be encoded .* lacks 'é' \(U\+00E9\)"):
        tokenizer.encode("1é2")


def test_messages_without_chat_template_are_refused(tmp_path) -> None:
    folder = make_folder(tmp_path)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": None}))
    prompt = Prompt(uid="3", messages=({"role": "user", "content": "a"},))
    with pytest.raises(ModelError, match="no chat template"):
        hf.load_tokenizer(folder).encode_prompt(prompt)
