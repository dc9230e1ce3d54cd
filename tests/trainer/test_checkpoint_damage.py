"""Damaged checkpoints are refused, before anything in them is run; and so is what JSON changes."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from shardloop.checkpoint import (
    DRIVER_FILE,
    TRAINER_FILE,
    checkpoint_name,
    latest_checkpoint,
    read_metadata,
    save_checkpoint,
)
from shardloop.checkpoint.plain import PlainReader
from shardloop.errors import CheckpointError
from tests.trainer.saving import loaded_value, message, save_value, shard

DAMAGES: dict[str, Any] = {
    "shard cut short": lambda path: shard(path).write_bytes(shard(path).read_bytes()[:100]),
    "shard of zeros": lambda path: shard(path).write_bytes(bytes(shard(path).stat().st_size)),
    "no shard": lambda path: shard(path).unlink(),
    "no metadata": lambda path: (path / ".metadata").unlink(),
    "metadata of zeros": lambda path: (path / ".metadata").write_bytes(bytes(100)),
    "no driver notes": lambda path: (path / DRIVER_FILE).unlink(),
    "other driver notes": lambda path: (path / DRIVER_FILE).write_text("{}"),
    "a list": lambda path: (path / TRAINER_FILE).write_text("[]"),
    "no version": lambda path: (path / TRAINER_FILE).write_text("{}"),
    "no text": lambda path: (path / TRAINER_FILE).write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_a_line_that_names_an_older_intact_one(
    damage: str, tmp_path, group
) -> None:
    paths = [tmp_path / checkpoint_name(step) for step in (1, 2, 3)]
    for step, path in enumerate(paths, start=1):
        save_value(path, step, group)
    DAMAGES[damage](paths[2])
    for intact in ("step-000002", "step-000001"):
        text = message(lambda: loaded_value(latest_checkpoint(tmp_path), group))
        assert text is not None and text.startswith(f"{paths[2]}: damaged (")
        assert text.endswith(
            f"; older intact checkpoint: {intact}; delete this folder to go on from it"
        )
        assert "\n" not in text and len(text) < 300 + len(str(paths[2]))
        DAMAGES["shard cut short"](paths[1])
    DAMAGES["no metadata"](paths[0])
    text = message(lambda: loaded_value(paths[2], group))
    assert text is not None and "there is no older intact checkpoint beside it" in text


def test_metadata_can_be_read_without_tensors_or_ranks(tmp_path, group) -> None:
    path = tmp_path / checkpoint_name(1)
    save_value(path, 1.0, group)
    entry = read_metadata(path).state_dict_metadata["w"]
    assert (entry.size, entry.properties.dtype) == (torch.Size([3]), torch.float32)
    shard(path).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"damaged \(__0_0.distcp has 0 bytes of "):
        read_metadata(path)


def test_metadata_that_calls_something_is_refused_and_not_run(tmp_path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "exploded").touch, ())

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=r"damaged .*which metadata does not need"):
        read_metadata(tmp_path)
    with pytest.raises(CheckpointError):
        PlainReader(tmp_path).read_metadata()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("extra", [{1: "a"}, {"a": (2, 3)}, {"a": [{"b": {None: 1}}]}])
def test_driver_data_that_json_would_change_is_refused_before_anything_is_written(
    extra: Any, tmp_path, group
) -> None:
    path = tmp_path / checkpoint_name(1)
    with pytest.raises(CheckpointError, match="would come back from JSON as"):
        save_checkpoint(path, {"w": torch.ones(3)}, version=1, extra=extra, group=group)
    assert list(tmp_path.iterdir()) == []
