"""Conversions: every way there and back gives the same bits, in bounded memory, or nothing."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardloop import hf
from shardloop.convert import Report, convert, differing, open_source, parse_target
from shardloop.convert import targets as targets_module
from shardloop.errors import CheckpointError, FingerprintError, ShardloopError, UsageError
from tests.convert.models import CONFIGS, FP8, make_model, read_folder, same, write_zero3


def converted(
    src: Path,
    to: str,
    dst: Path,
    *,
    given: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 10**9,
    **source: Any,
) -> Report:
    return convert(
        open_source(src, given=given, **source),
        parse_target(to, max_shard_bytes=max_shard_bytes),
        dst,
        dtype=dtype,
        progress=lambda *_: None,
    )


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "way",
    [
        ["dcp"],
        ["megatron:tp=2"],
        ["megatron:tp=2,pp=2"],
        ["dcp", "megatron:pp=3", "megatron:pp=2,tp=4", "dcp"],
    ],
    ids=" ".join,
)
def test_there_and_back_gives_the_same_bits(kind, seed, way, tmp_path) -> None:
    dtype = [torch.float32, torch.bfloat16][seed]
    weights = make_model(tmp_path / "0", kind, dtype=dtype, seed=seed)
    for i, to in enumerate([*way, "hf"]):
        converted(tmp_path / f"{i}", to, tmp_path / f"{i + 1}", max_shard_bytes=3000)
    back = tmp_path / f"{len(way) + 1}"
    assert len(list(back.glob("*.safetensors"))) > 1
    assert same(read_folder(back), weights), f"{seed=}"


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("spec", ["ep=2", "ep=4,tp=2", "pp=3,ep=2,tp=2"])
def test_experts_come_back_from_expert_parallel_files(kind, spec, tmp_path) -> None:
    weights = make_model(tmp_path / "hf", kind)
    converted(tmp_path / "hf", f"megatron:{spec}", tmp_path / "ranks")
    # With one stage the second number of a folder could be a stage's: the layout must be given.
    given = None if "pp" in spec else f"megatron:{spec}"
    converted(tmp_path / "ranks", "hf", tmp_path / "back", given=given)
    assert same(read_folder(tmp_path / "back"), weights)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("num_ranks", [1, 3, 7])
def test_flat_partitions_come_back_without_their_padding(kind, num_ranks, tmp_path) -> None:
    weights = make_model(tmp_path / "hf", kind)
    frozen, buffers = ("model.norm.weight",), ("model.layers.1.input_layernorm.weight",)
    write_zero3(tmp_path / "z", weights, num_ranks=num_ranks, frozen=frozen, buffers=buffers)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    converted(tmp_path / "z", "hf", tmp_path / "back", config=config)
    assert same(read_folder(tmp_path / "back"), weights)
    converted(tmp_path / "z", "megatron:tp=2", tmp_path / "ranks", config=config)
    converted(tmp_path / "ranks", "hf", tmp_path / "again")
    assert same(read_folder(tmp_path / "again"), weights)


def test_fp8_weights_and_their_scales_keep_their_bits(tmp_path) -> None:
    weights = make_model(tmp_path / "hf", "biases", dtype=torch.bfloat16, quantization_config=FP8)
    assert {t.dtype for t in weights.values()} == {
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float32,
    }
    converted(tmp_path / "hf", "dcp", tmp_path / "dcp")
    converted(tmp_path / "dcp", "hf", tmp_path / "back", dtype=torch.float32)
    plain = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in weights.items()}
    assert same(read_folder(tmp_path / "back"), plain)


def test_padding_of_the_vocabulary_never_reaches_an_export(tmp_path) -> None:
    weights = make_model(tmp_path / "hf", "tied q/k norms")
    converted(tmp_path / "hf", "megatron:tp=2", tmp_path / "ranks")
    source = open_source(tmp_path / "ranks")
    rows = source.tensors(0)["embedding.word_embeddings.weight"].shape[0]
    assert rows > len(weights["model.embed_tokens.weight"]) == 10
    converted(tmp_path / "ranks", "hf", tmp_path / "back")
    assert read_folder(tmp_path / "back")["model.embed_tokens.weight"].shape == (10, 16)


def test_a_dtype_is_changed_only_when_asked_and_told(tmp_path) -> None:
    weights = make_model(tmp_path / "hf", "biases")
    kept = converted(tmp_path / "hf", "dcp", tmp_path / "kept")
    changed = converted(tmp_path / "hf", "hf", tmp_path / "bf16", dtype=torch.bfloat16)
    assert kept.converted == {}
    assert changed.converted == {"float32 -> bfloat16": len(weights)}
    assert same(
        read_folder(tmp_path / "bf16"), {n: t.to(torch.bfloat16) for n, t in weights.items()}
    )
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


def mix_dtypes(folder: Path) -> None:
    weights = read_folder(folder)
    name = "model.layers.1.self_attn.k_proj.weight"
    weights[name] = weights[name].to(torch.bfloat16)
    hf.shards.write_weights(folder, specs_of(weights), weights.__getitem__)


def specs_of(weights: dict[str, Tensor]) -> dict[str, hf.TensorSpec]:
    return {name: hf.TensorSpec(tuple(t.shape), t.dtype) for name, t in weights.items()}


def test_tensors_of_two_dtypes_stay_so_and_are_not_fused_without_a_word(tmp_path) -> None:
    make_model(tmp_path / "hf", "biases")
    mix_dtypes(tmp_path / "hf")
    mixed = read_folder(tmp_path / "hf")
    converted(tmp_path / "hf", "dcp", tmp_path / "dcp")
    converted(tmp_path / "dcp", "hf", tmp_path / "back")
    assert same(read_folder(tmp_path / "back"), mixed)
    with pytest.raises(CheckpointError, match=r"--dtype.*\n.*linear_qkv.*bfloat16 and .*float32"):
        converted(tmp_path / "hf", "megatron:tp=1", tmp_path / "ranks")
    assert not (tmp_path / "ranks").exists()
    converted(tmp_path / "hf", "megatron:tp=1", tmp_path / "ranks", dtype=torch.float32)


def test_all_faults_are_listed_before_anything_is_written(tmp_path) -> None:
    weights = make_model(tmp_path / "hf", "biases")
    del weights["model.norm.weight"]
    weights["surplus"] = torch.zeros(1)
    weights["lm_head.weight"] = torch.zeros(12, 16)
    weights["model.layers.0.input_layernorm.weight"] = torch.zeros(16).to(torch.float8_e4m3fn)
    hf.shards.write_weights(tmp_path / "hf", specs_of(weights), weights.__getitem__)
    with pytest.raises(CheckpointError) as caught:
        converted(tmp_path / "hf", "dcp", tmp_path / "dcp")
    text = str(caught.value)
    assert "missing: model.norm.weight of shape (16,)" in text
    assert "unexpected: surplus" in text
    assert "shape of lm_head.weight is (12, 16), it must be (10, 16)" in text
    assert "dtype of model.layers.0.input_layernorm.weight is torch.float8_e4m3fn" in text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


@pytest.mark.parametrize("equal", [True, False])
def test_the_alias_of_a_tied_head_is_left_out_if_it_is_one(equal, tmp_path) -> None:
    weights = make_model(tmp_path / "hf", "tied q/k norms")
    alias = weights["model.embed_tokens.weight"] + (not equal)
    given = {**weights, "lm_head.weight": alias}
    hf.shards.write_weights(tmp_path / "hf", specs_of(given), given.__getitem__)
    if equal:
        converted(tmp_path / "hf", "hf", tmp_path / "back")
        assert same(read_folder(tmp_path / "back"), weights)
    else:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from"):
            converted(tmp_path / "hf", "hf", tmp_path / "back")


def test_an_existing_destination_is_left_as_it_is(tmp_path) -> None:
    make_model(tmp_path / "hf", "biases")
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError, match="there exists; choose another path"):
        converted(tmp_path / "hf", "dcp", tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.parametrize("to", ["hf", "dcp", "megatron:tp=2"])
def test_what_fails_half_way_leaves_no_destination(to, tmp_path, monkeypatch) -> None:
    make_model(tmp_path / "hf", "biases")
    source = open_source(tmp_path / "hf")
    real, calls = source.reader.read, []

    def fail_at_the_tenth(*args: Any) -> Tensor:
        calls.append(args)
        if len(calls) == 10:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(source.reader, "read", fail_at_the_tenth)
    with pytest.raises(CheckpointError, match="No space left"):
        convert(source, parse_target(to), tmp_path / "out", dtype=None, progress=lambda *_: None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_wrong_byte_in_what_was_written_is_noticed(tmp_path, monkeypatch) -> None:
    make_model(tmp_path / "hf", "biases")
    real = targets_module.write_hf_folder

    def write_and_flip(folder: Path, **rest: Any) -> None:
        real(folder, **rest)
        file = folder / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(targets_module, "write_hf_folder", write_and_flip)
    with pytest.raises(
        FingerprintError, match=r"differs from the source:\n  lm_head\.weight differs"
    ):
        converted(tmp_path / "hf", "hf", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_differences_are_named_whatever_the_formats(tmp_path) -> None:
    weights = make_model(tmp_path / "one", "biases")
    converted(tmp_path / "one", "megatron:tp=2,pp=2", tmp_path / "ranks")
    one, ranks = open_source(tmp_path / "one"), open_source(tmp_path / "ranks")
    told: list[tuple[str, int, int]] = []
    assert differing(one, ranks, progress=lambda *what: told.append(what)) == []
    assert {what for what, _, _ in told} == {"compared"} and len(told) > len(weights)
    assert all(0 < done <= total for _, done, total in told)
    weights["model.layers.2.mlp.up_proj.weight"][3, 1] += 1e-3
    hf.shards.write_weights(tmp_path / "one", specs_of(weights), weights.__getitem__)
    changed = open_source(tmp_path / "one")
    assert differing(changed, ranks, progress=lambda *_: None) == [
        "model.layers.2.mlp.up_proj.weight differs"
    ]


def test_copies_that_ranks_hold_must_agree(tmp_path) -> None:
    make_model(tmp_path / "hf", "biases")
    converted(tmp_path / "hf", "megatron:tp=2", tmp_path / "ranks")
    file = tmp_path / "ranks" / "release" / "mp_rank_01" / "model_optim_rng.pt"
    content = torch.load(file)
    content["model"]["decoder.final_layernorm.weight"][3] += 1
    torch.save(content, file)
    with pytest.raises(FingerprintError, match=r"model\.norm\.weight: the ranks of .* different"):
        converted(tmp_path / "ranks", "hf", tmp_path / "out")


@pytest.mark.parametrize("to", ["dcp", "megatron:tp=1"])
def test_a_full_disk_is_an_error_of_the_checkpoint_and_nothing_is_left(to, tmp_path) -> None:
    make_model(tmp_path / "hf", "biases")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointError, match="out: cannot be written: "):
            converted(tmp_path / "hf", to, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_of_two_conversions_to_one_path_the_second_is_refused(tmp_path) -> None:
    weights = make_model(tmp_path / "hf", "biases")
    refused: list[str] = []

    def second(what: str, done: int, total: int) -> None:
        if not refused:
            with pytest.raises(UsageError, match="another conversion") as caught:
                converted(tmp_path / "hf", "dcp", tmp_path / "out")
            refused.append(str(caught.value))

    source = open_source(tmp_path / "hf")
    convert(source, parse_target("hf"), tmp_path / "out", dtype=None, progress=second)
    assert refused
    assert same(read_folder(tmp_path / "out"), weights)


KILLED = """
import os, signal, sys
from pathlib import Path
from shardloop.convert import convert, open_source, parse_target

def progress(what, done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

src, to, dst = sys.argv[1:]
convert(open_source(Path(src)), parse_target(to), Path(dst), dtype=None, progress=progress)
"""


@pytest.mark.parametrize("to", ["hf", "dcp", "megatron:tp=2"])
def test_a_killed_conversion_leaves_nothing_that_looks_complete(to, tmp_path) -> None:
    weights = make_model(tmp_path / "hf", "biases")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "hf"), to, str(tmp_path / "out")]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.unfinished", "hf"]
    with pytest.raises(ShardloopError):
        open_source(tmp_path / ".out.unfinished")
    converted(tmp_path / "hf", to, tmp_path / "out")
    converted(tmp_path / "out", "hf", tmp_path / "back")
    assert same(read_folder(tmp_path / "back"), weights)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "hf", "out"]
