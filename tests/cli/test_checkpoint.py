"""`shardloop checkpoint`: what it tells, what it writes, and how it fails."""

import json
from pathlib import Path

import pytest
import torch

from shardloop.cli.checkpoint.words import _group_lines
from shardloop.cli.main import COMMANDS, main
from shardloop.hf.shards import write_weights
from tests.convert.models import CONFIGS, make_model, read_folder, same
from tests.convert.test_convert import specs_of


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(tmp_path / "model", "qwen3_moe")
    return tmp_path / "model"


def checkpoint(*arguments: object) -> int:
    return main(["checkpoint", *map(str, arguments)])


def test_help_has_examples(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        checkpoint("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"shardloop checkpoint {name}" in text for name in ("inspect", "convert", "verify"))
    assert "checkpoint" in COMMANDS


def test_converted_there_and_back_is_equal_and_verified(model, tmp_path, capsys) -> None:
    assert checkpoint("convert", model, tmp_path / "r", "--to", "megatron:pp=2,ep=2,tp=2") == 0
    assert "fingerprints equal" in capsys.readouterr().out
    assert checkpoint("convert", tmp_path / "r", tmp_path / "b", "--max-shard-bytes", 5000) == 0
    assert same(read_folder(tmp_path / "b"), read_folder(model))
    assert checkpoint("verify", tmp_path / "b", "--against", tmp_path / "r") == 0
    assert "equal to" in capsys.readouterr().out


def test_inspect_tells_format_layout_groups_and_places(model, tmp_path, capsys) -> None:
    assert checkpoint("convert", model, tmp_path / "r", "--to", "megatron:pp=2,tp=2") == 0
    capsys.readouterr()
    name = "model.layers.1.self_attn.k_proj.weight"
    assert checkpoint("inspect", tmp_path / "r", "--json", "--tensor", name) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["format"], facts["layout"]) == ("megatron", "megatron:pp=2,tp=2")
    assert facts["model"]["family"] == "qwen3_moe"
    assert facts["model"]["faults"] == []
    # Two kv heads of 4 rows on two ranks of the first stage, which has layers 0 and 1.
    places = [(place["rank"], place["box"]) for place in facts["places"]]
    assert places == [(0, [[0, 4], [0, 16]]), (1, [[4, 8], [0, 16]])]
    assert all(
        place["file"].endswith(f"mp_rank_{place['rank']:02d}_000/model_optim_rng.pt")
        for place in facts["places"]
    )
    assert sum(group["num_bytes"] for group in facts["groups"]) == facts["num_bytes"]
    assert checkpoint("inspect", model, "--tensor", name) == 0
    text = capsys.readouterr().out
    assert "hf (Hugging Face safetensors)" in text
    assert "model.layers.{0-2}.mlp.experts.{0-3}.up_proj.weight" in text
    assert f"rank 0 has [0:8, 0:16] in {name} of {model / 'model.safetensors'}" in text


def test_inspect_sums_up_what_a_run_keeps_beside_its_weights() -> None:
    def group(name: str, count: int) -> dict[str, object]:
        shape = {"shapes": [[2, 3]], "dtypes": ["float32"], "ranks": [0]}
        return {"name": name, "count": count, "num_bytes": 24 * count, **shape}

    names = ["model.a", "optim.exp_avg.a", "optim.exp_avg.b", "reference.a", "optimist.a"]
    told = list(_group_lines([group(name, 2) for name in names], ranks=1))
    assert [line.split()[0] for line in told] == [
        "model.a",
        "optimist.a",
        "optim.exp_avg.*",
        "reference.*",
    ]
    assert told[2].endswith("4 tensors, 96 B")


def test_verify_names_elements_that_are_not_finite(model, capsys) -> None:
    weights = read_folder(model)
    weights["model.norm.weight"][3] = torch.inf
    weights["model.norm.weight"][5] = torch.nan
    del weights["lm_head.weight"]
    write_weights(model, specs_of(weights), weights.__getitem__)
    assert checkpoint("verify", model) == 6
    text = capsys.readouterr().err
    assert "model.norm.weight: 2 of 16 elements are not finite" in text
    assert "missing: lm_head.weight" in text


def test_verify_against_names_what_differs(model, tmp_path, capsys) -> None:
    assert checkpoint("convert", model, tmp_path / "16", "--dtype", "bf16") == 0
    assert checkpoint("verify", tmp_path / "16", "--against", model) == 4
    assert "lm_head.weight is torch.bfloat16 and torch.float32" in capsys.readouterr().err
    assert checkpoint("verify", tmp_path / "16", "--against", model, "--dtype", "bf16") == 0
    weights = read_folder(model)
    weights["model.layers.2.mlp.experts.3.down_proj.weight"][0, 0] += 1
    write_weights(model, specs_of(weights), weights.__getitem__)
    capsys.readouterr()
    assert checkpoint("verify", tmp_path / "16", "--against", model, "--dtype", "bf16") == 4
    text = capsys.readouterr().err
    assert "1 tensors differ:\n  model.layers.2.mlp.experts.3.down_proj.weight differs" in text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads=0; it must be a whole number from 1 to"),
        ({"num_attention_heads": -4}, "num_attention_heads=-4; it must be a whole number from 1"),
        ({"hidden_size": "16"}, "hidden_size='16'; it must be a whole number from 1 to 2147483647"),
        ({"num_experts": None}, "config.json has no num_experts; add it"),
        ({"num_hidden_layers": 10**30}, "000; it must be a whole number from 1 to 2147483647"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads="),
        ({"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1}, "choose sizes for at most"),
    ],
)
def test_a_config_of_wrong_sizes_is_named_by_field(model, tmp_path, capsys, change, told) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    for arguments in (("verify", model), ("convert", model, tmp_path / "out")):
        assert checkpoint(*arguments) == 2, arguments
        captured = capsys.readouterr()
        assert (captured.out, told in captured.err) == ("", True), captured.err
    assert checkpoint("inspect", model) == 0, "the rest of it can be told"
    text = capsys.readouterr().out
    assert f"{'model':10}not known: " in text and told in text
    assert checkpoint("inspect", model, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"] is None and told in facts["model_unknown"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is not a known family; choose from llama, "),
        ({"model_type": ["llama"]}, "model_type=['llama'] is not a known family"),
        ({"quantization_config": {"quant_method": "awq"}}, "only fp8 in square blocks"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": 5}},
            "only fp8 in square blocks",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": ["a", "a"]}},
            "block='a'; it must be a whole number from 1 to",
        ),
    ],
)
def test_elements_of_a_model_that_is_not_known_are_verified(model, capsys, change, told) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert checkpoint("verify", model) == 0
    text = capsys.readouterr().out
    assert "every element finite" in text and "names and shapes were not checked: " in text
    assert told in text


def test_mistakes_end_with_the_code_of_their_kind(model, tmp_path, capsys) -> None:
    out, other = tmp_path / "out", tmp_path / "other.json"
    other.write_text(json.dumps({**CONFIGS["qwen3_moe"], "num_experts": 8}))
    wrong: list[tuple[int, str, tuple[object, ...]]] = [
        (2, "no such path", ("inspect", tmp_path / "absent")),
        (2, "no command checkpoint 'copy'", ("copy", model)),
        (2, "to='gguf'; choose from hf, dcp, megatron", ("convert", model, out, "--to", "gguf")),
        (2, "tp=3 does not divide", ("convert", model, out, "--to", "megatron:tp=3")),
        (2, "leave out dp", ("convert", model, out, "--to", "megatron:dp=2,tp=2")),
        (2, "exists; choose another path", ("convert", model, model)),
        (2, "add --against", ("verify", model, "--dtype", "bf16")),
        (2, "tensor='nothing' is not in", ("inspect", model, "--tensor", "nothing")),
        (2, "by its sizes alone", ("convert", model, out, "--model", "Qwen3-0.6B")),
        (6, "does not fit its model", ("convert", model, out, "--model", other)),
    ]
    for code, message, arguments in wrong:
        assert checkpoint(*arguments) == code, arguments
        assert message in capsys.readouterr().err
    (model / "config.json").unlink()
    assert checkpoint("convert", model, out) == 2
    assert "name the model with --model" in capsys.readouterr().err
    assert checkpoint("verify", model) == 0, "without a model its elements can be checked"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other.json"]
