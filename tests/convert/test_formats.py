"""Reading what others wrote: nothing in it is run, and every damage is named."""

import argparse
import io
import json
import pickle
import shutil
import sys
import types
from collections import Counter
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardloop.convert import open_checkpoint, open_source, source_faults
from shardloop.convert.check import element_faults
from shardloop.convert.dcp_files import write_dcp
from shardloop.convert.store import whole
from shardloop.convert.torch_files import Inert, load_torch_file, plain
from shardloop.errors import CheckpointError, ShardloopError, UsageError
from shardloop.hf.shards import TensorSpec
from tests.convert.models import make_model, read_folder, same, write_zero3
from tests.convert.test_convert import converted, specs_of


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("exploded").touch, ())


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.fixture
def hf_folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "hf", "biases")
    return tmp_path / "hf"


@pytest.fixture
def ranks(tmp_path: Path, hf_folder: Path) -> Path:
    converted(hf_folder, "megatron:tp=2,pp=2", tmp_path / "ranks")
    return tmp_path / "ranks" / "release"


@pytest.fixture
def dcp(tmp_path: Path, hf_folder: Path) -> Path:
    converted(hf_folder, "dcp", tmp_path / "dcp")
    return tmp_path / "dcp"


@pytest.fixture
def zero3(tmp_path: Path) -> Path:
    weights = make_model(tmp_path / "model", "biases")
    write_zero3(tmp_path / "zero3", weights, num_ranks=3)
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "zero3")
    return tmp_path / "zero3"


def test_a_pickle_that_calls_something_is_refused_and_not_run(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "bomb": Bomb()}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=r"a pickle that calls .*; only tensors and plain"):
        load_torch_file(tmp_path / "file.pt")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="which metadata does not need"):
        open_checkpoint(tmp_path / "dcp")
    assert not (tmp_path / "exploded").exists()


def test_objects_of_a_framework_are_kept_as_data_without_its_code(tmp_path, monkeypatch) -> None:
    module = types.ModuleType("deepspeed.things")

    class Stage(int, Enum):
        weights = 3

    class Scaler:
        def __init__(self) -> None:
            self.scale = 2.0

    for kind in (Stage, Scaler):
        kind.__module__, kind.__qualname__ = module.__name__, kind.__name__
        setattr(module, kind.__name__, kind)
    content = {
        "args": argparse.Namespace(pipeline_model_parallel_size=1, stage=Stage.weights),
        "stage": Stage.weights,
        "scaler": Scaler(),
        "rng": np.random.default_rng(0).integers(9, size=3),
        "extra": io.BytesIO(b"state"),
        "model": {"a": torch.ones(2)},
    }
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
        patch.setitem(sys.modules, module.__name__, module)
        torch.save(content, tmp_path / "file.pt")
    loaded = load_torch_file(tmp_path / "file.pt")
    kept = {name: value for name, value in loaded.items() if isinstance(value, Inert)}
    assert kept.keys() == content.keys() - {"model"}
    assert plain(loaded["stage"]) == 3
    assert loaded["scaler"].state == {"scale": 2.0}
    assert loaded["args"].state["pipeline_model_parallel_size"] == 1
    assert torch.equal(loaded["model"]["a"], torch.ones(2))


def test_settings_tell_stages_from_experts_where_folders_do_not(tmp_path) -> None:
    make_model(tmp_path / "hf", "mixtral")
    converted(tmp_path / "hf", "megatron:ep=2", tmp_path / "ranks")
    for file in (tmp_path / "ranks").rglob("*.pt"):
        args = argparse.Namespace(pipeline_model_parallel_size=1)
        torch.save({**torch.load(file), "args": args}, file)
    assert open_checkpoint(tmp_path / "ranks").spec == "megatron:ep=2"
    converted(tmp_path / "ranks", "hf", tmp_path / "back")


def test_what_is_written_as_dcp_loads_in_torch(tmp_path, hf_folder, dcp) -> None:
    weights = read_folder(hf_folder)
    loaded = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in weights.items()}
    with pytest.warns(UserWarning, match="single process"):
        load(loaded, storage_reader=FileSystemReader(dcp), no_dist=True)
    assert same({name.removeprefix("model."): t for name, t in loaded.items()}, weights)


def test_a_box_of_a_chunked_tensor_is_put_together_from_its_chunks(tmp_path) -> None:
    # One tensor in four chunks of 2 x 3, as four ranks of a 2-D mesh would leave it.
    whole_tensor = torch.arange(24.0).reshape(4, 6)
    (tmp_path / "dcp").mkdir()
    parts = {
        f"{i}{j}": whole_tensor[2 * i : 2 * i + 2, 3 * j : 3 * j + 3].contiguous()
        for i in range(2)
        for j in range(2)
    }
    write_dcp(tmp_path / "dcp", specs_of(parts), parts.__getitem__)
    metadata = FileSystemReader(tmp_path / "dcp").read_metadata()
    entries = metadata.state_dict_metadata
    joined = TensorStorageMetadata(entries["model.00"].properties, whole_tensor.shape, [])
    for index, place in list(metadata.storage_data.items()):
        i, j = map(int, index.fqn.removeprefix("model."))
        offsets = torch.Size([2 * i, 3 * j])
        (chunk,) = entries.pop(index.fqn).chunks
        joined.chunks.append(type(chunk)(offsets=offsets, sizes=chunk.sizes))
        del metadata.storage_data[index]
        metadata.storage_data[type(index)("model.t", offsets)] = place
    entries["model.t"] = joined
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    reader = open_checkpoint(tmp_path / "dcp")
    for rows in [(0, 4), (1, 3), (2, 4), (3, 4)]:
        for columns in [(0, 6), (2, 4), (0, 3), (5, 6)]:
            part = reader.read(0, "model.t", (rows, columns))
            assert torch.equal(part, whole_tensor[slice(*rows), slice(*columns)])


def test_a_flat_partition_across_groups_is_read_where_it_is(zero3) -> None:
    source = open_source(zero3)
    assert source_faults(source) == []
    assert list(element_faults(source.reader, progress=lambda *_: None)) == [], "no padding is read"


def missing_rank(folder: Path) -> None:
    shutil.rmtree(folder / "mp_rank_01_000")


def surplus_rank(folder: Path) -> None:
    shutil.copytree(folder / "mp_rank_01_000", folder / "mp_rank_02_000")


def short_rank(folder: Path) -> None:
    cut_short(folder / "mp_rank_00_001" / "model_optim_rng.pt")


def other_program(folder: Path) -> None:
    torch.save({"weights": {}}, folder / "mp_rank_00_000" / "model_optim_rng.pt")


def virtual_stages(folder: Path) -> None:
    torch.save({"model0": {}, "model1": {}}, folder / "mp_rank_00_000" / "model_optim_rng.pt")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing_rank, r"no mp_rank_01_000/model_optim_rng\.pt of rank 1"),
        (surplus_rank, r"no mp_rank_02_001/model_optim_rng\.pt"),
        (short_rank, r"mp_rank_00_001/model_optim_rng\.pt: damaged or cut short"),
        (other_program, "has no mapping 'model'"),
        (virtual_stages, "several virtual stages"),
    ],
)
def test_damage_of_rank_files_is_named(damage, message, ranks) -> None:
    damage(ranks)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(ranks)


@pytest.mark.parametrize("given", ["megatron:tp=4,pp=2", "megatron:tp=1,pp=2", "megatron:tp=4"])
def test_a_wrong_number_of_ranks_is_refused(given, ranks) -> None:
    with pytest.raises(CheckpointError, match=r"there are folders of 4; .*rank"):
        open_checkpoint(ranks, given=given)


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_a_missing_file_of_a_rank_is_named(kind, zero3) -> None:
    (file,) = zero3.glob(f"*zero_pp_rank_1_mp_rank_00_{kind}_states.pt")
    file.unlink()
    with pytest.raises(CheckpointError, match=f"by 3 ranks; no {kind}_states.pt of rank 1"):
        open_checkpoint(zero3)


def test_another_stage_of_zero_is_refused(zero3) -> None:
    for file in zero3.glob("*_optim_states.pt"):
        content = torch.load(file)
        content["optimizer_state_dict"]["zero_stage"] = 2
        torch.save(content, file)
    with pytest.raises(CheckpointError, match="is of ZeRO stage 2; only stage 3 is read"):
        open_checkpoint(zero3)


def test_flat_groups_that_are_too_short_are_refused(zero3) -> None:
    file = zero3 / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    content = torch.load(file)
    groups = content["optimizer_state_dict"]["fp32_flat_groups"]
    groups[-1] = groups[-1][:-1].clone()
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="the files do not belong together"):
        open_checkpoint(zero3)


def test_short_and_missing_files_of_dcp_are_named(dcp) -> None:
    (file,) = dcp.glob("*.distcp")
    size = file.stat().st_size
    cut_short(file)
    with pytest.raises(CheckpointError, match=rf"__0_0\.distcp has {size // 2} bytes of \d+"):
        open_checkpoint(dcp)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"no file __0_0\.distcp"):
        open_checkpoint(dcp)
    cut_short(dcp / ".metadata")
    with pytest.raises(CheckpointError, match=r"\.metadata: damaged or cut short"):
        open_checkpoint(dcp)


def test_damage_of_safetensors_is_named(tmp_path, hf_folder) -> None:
    converted(hf_folder, "hf", tmp_path / "parts", max_shard_bytes=4000)
    index = tmp_path / "parts" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = Counter(content["weight_map"].values())
    assert len(files) > 2
    moved = {**content["weight_map"], "model.norm.weight": next(iter(files))}
    index.write_text(json.dumps({**content, "weight_map": moved}))
    with pytest.raises(CheckpointError, match=r"says wrongly: model\.norm\.weight in model-00001"):
        open_checkpoint(tmp_path / "parts")
    index.write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        open_checkpoint(tmp_path / "parts")
    index.write_text(json.dumps(content))
    cut_short(tmp_path / "parts" / max(files))
    with pytest.raises(CheckpointError, match="the weights cannot be read"):
        open_checkpoint(tmp_path / "parts")
    (tmp_path / "parts" / max(files)).unlink()
    with pytest.raises(CheckpointError, match=f"no {max(files)}, named by"):
        open_checkpoint(tmp_path / "parts")


def test_what_is_no_checkpoint_is_told_with_what_to_give(tmp_path, dcp) -> None:
    with pytest.raises(UsageError, match="no such path"):
        open_checkpoint(tmp_path / "absent")
    run = tmp_path / "run"
    shutil.copytree(dcp, run / "checkpoints" / "step-000050")
    (run / "checkpoints" / "step-000050" / "trainer.json").write_text("{}")
    for folder in (run, run / "checkpoints"):
        with pytest.raises(UsageError, match=r"choose one: .*/step-000050"):
            open_checkpoint(folder)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin").touch()
    with pytest.raises(UsageError, match="pickled weights are not read"):
        open_checkpoint(tmp_path / "old")
    with pytest.raises(UsageError, match=r"from='hf', but .* is dcp"):
        open_checkpoint(dcp, given="hf")
    with pytest.raises(UsageError, match="is no format; choose from hf, dcp, megatron, zero3"):
        open_checkpoint(dcp, given="gguf")


def test_a_tracker_file_names_the_checkpoint(tmp_path, zero3, ranks) -> None:
    assert open_checkpoint(ranks.parent).path == ranks
    (tmp_path / "run").mkdir()
    zero3.rename(tmp_path / "run" / "global_step7")
    (tmp_path / "run" / "latest").write_text("global_step7")
    assert open_checkpoint(tmp_path / "run").notes["global_steps"] == "7"
    (tmp_path / "run" / "latest").write_text("../run/global_step7")
    with pytest.raises(CheckpointError, match="points at"):
        open_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["hf_folder", "dcp", "ranks", "zero3"])
def test_a_damaged_file_is_an_error_with_its_name(seed, kind, request) -> None:
    """Whatever bytes are wrong: a named error, or bits that are read as they are."""
    folder = request.getfixturevalue(kind)
    generator = torch.Generator().manual_seed(seed)
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".json")
    for file in files[:3]:
        content = bytearray(file.read_bytes())
        for place in torch.randint(len(content), (40,), generator=generator).tolist():
            content[place] ^= 1 + seed
        file.write_bytes(content)
        try:
            reader = open_checkpoint(folder)
            for rank, name, stored in reader.everything():
                reader.read(rank, name, whole(stored.shape))
        except ShardloopError as error:
            assert str(folder) in str(error), f"{seed=} {file}"


@pytest.mark.parametrize("format_", ["dcp", "ranks", "zero3"])
def test_a_flipped_bit_of_a_weight_is_found_by_its_checksum(format_, request) -> None:
    folder = request.getfixturevalue(format_)
    reader = open_checkpoint(folder)
    rank, name, stored = next(entry for entry in reader.everything() if entry[2].num_elements > 8)
    octets = reader.read(rank, name, whole(stored.shape)).numpy().tobytes()
    file = stored.files[0]
    content = bytearray(file.read_bytes())
    content[content.index(octets) + 1] ^= 1
    file.write_bytes(content)
    (fault,) = list(element_faults(open_checkpoint(folder), progress=lambda *_: None))
    assert str(file) in fault and "checksum differs" in fault


def chunks_of(key: str, lows: list[int], size: int) -> Metadata:
    chunks = [ChunkStorageMetadata(torch.Size([lo]), torch.Size([size])) for lo in lows]
    properties = TensorProperties(dtype=torch.float32)
    entry = TensorStorageMetadata(properties, torch.Size([4 * size]), chunks)
    places = {MetadataIndex(key, [lo]): _StorageInfo("data", 0, 0) for lo in lows}
    return Metadata(state_dict_metadata={key: entry}, planner_data=None, storage_data=places)


@pytest.mark.parametrize("lows", [[0, 4, 7, 12], [0, 4, 8, 13], [-1, 4, 8, 12]])
def test_chunks_that_overlap_or_lie_outside_their_tensor_are_refused(lows, tmp_path) -> None:
    (tmp_path / "data").touch()
    for metadata, is_right in ((chunks_of("w", [8, 0, 12, 4], 4), 1), (chunks_of("w", lows, 4), 0)):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        if is_right:
            open_checkpoint(tmp_path)
        else:
            with pytest.raises(CheckpointError, match="w has chunks that overlap or lie outside"):
                open_checkpoint(tmp_path)


@pytest.mark.parametrize("seed", range(30))
def test_altered_metadata_is_read_or_refused_and_nothing_else(dcp, seed) -> None:
    content = bytearray((dcp / ".metadata").read_bytes())
    random = np.random.default_rng(seed)
    content[random.integers(len(content))] ^= 1 << random.integers(8)
    (dcp / ".metadata").write_bytes(content)
    with suppress(ShardloopError):
        source_faults(open_source(dcp))
        list(element_faults(open_checkpoint(dcp), progress=lambda *_: None))


def test_names_that_are_not_hugging_face_s_are_listed_on_both_sides(tmp_path, hf_folder) -> None:
    weights = {name.replace("model.", "wrapped."): t for name, t in read_folder(hf_folder).items()}
    specs = {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in weights.items()}
    (tmp_path / "odd").mkdir()
    write_dcp(tmp_path / "odd", specs, weights.__getitem__)
    shutil.copy(hf_folder / "config.json", tmp_path / "odd")
    faults = "\n".join(source_faults(open_source(tmp_path / "odd")))
    assert "missing: model.embed_tokens.weight" in faults
    assert "wrapped.embed_tokens.weight" in faults


def test_a_damaged_config_is_no_unknown_model(hf_folder) -> None:
    (hf_folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not valid JSON"):
        open_source(hf_folder)
