"""Folders of checkpoints: whole or absent wherever a save fails, pruned, replaced, on the disk."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardloop.checkpoint import (
    TRAINER_FILE,
    checkpoint_name,
    latest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    writing,
)
from shardloop.errors import CheckpointError
from shardloop.parallel.context import RankContext
from tests.harness import run_ranks
from tests.trainer.saving import loaded_value, message, save_value


def make_fake_run(run: Path) -> None:
    for step in (5, 40, 100, 1_000_000):
        (run / checkpoint_name(step)).mkdir()
        (run / checkpoint_name(step) / TRAINER_FILE).touch()
    (run / checkpoint_name(2_000_000)).mkdir()  # not complete
    (run / ".step-3000000.unfinished").mkdir()


def test_the_latest_checkpoint_is_the_complete_one_of_the_highest_step(tmp_path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None
    make_fake_run(tmp_path)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1000000"


def test_pruning_keeps_the_newest_complete_checkpoints(tmp_path) -> None:
    make_fake_run(tmp_path)
    prune_checkpoints(tmp_path, keep=2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-000100", "step-1000000", "step-2000000"}


def two_ranks_that_stop_at_different_times(context: RankContext, run: Path) -> tuple[Any, ...]:
    """One rank fails at once, the other goes on writing for a while and makes files."""
    path = run / checkpoint_name(1)

    def slow_save(unfinished: Path, *_: Any) -> None:
        if context.rank == 0:
            raise OSError("rank 0 cannot write")
        time.sleep(0.5)
        (unfinished / "late").mkdir()

    writing.write_shards = slow_save
    text = message(lambda: save_checkpoint(path, {}, version=1, extra={}, group=dist.group.WORLD))
    left = sorted(entry.name for entry in run.iterdir())
    dist.barrier()

    def refusing(path: Path) -> None:
        raise PermissionError(f"not allowed to remove {path.name}")

    writing.remove = refusing
    writing.start_folder = lambda unfinished: unfinished.mkdir()
    stuck = message(lambda: save_checkpoint(path, {}, version=1, extra={}, group=dist.group.WORLD))
    return text, left, stuck


def test_what_a_failed_save_wrote_goes_when_all_ranks_have_stopped_or_is_named(tmp_path) -> None:
    for text, left, stuck in run_ranks(two_ranks_that_stop_at_different_times, 2, tmp_path):
        assert "rank 0 cannot write" in text
        assert left == []
        assert "rank 0 cannot write" in stuck
        assert "remove by hand what is left" in stuck
        assert "not allowed to remove .step-000001.unfinished" in stuck


class Killed(BaseException):
    """Nothing handles it: what is on the disk stays as it is."""


def failing_from(
    first_bad: int, plain: Callable[..., Any], how: type[BaseException], folder: Path
) -> Callable[..., Any]:
    """`plain`, but from its call number `first_bad` in `folder` on it raises `how`."""
    num_calls = 0

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += Path(path).parent == folder
        if Path(path).parent == folder and num_calls >= first_bad:
            raise how("no")
        return plain(path, *args, **kwargs)

    return call


@pytest.mark.parametrize("how", [OSError, Killed])
@pytest.mark.parametrize("call", ["rename", "rmtree"])
def test_replacing_a_checkpoint_leaves_one_to_load_wherever_it_fails(
    call: str, how: type[BaseException], tmp_path, group, monkeypatch
) -> None:
    """Each call to the file system in turn fails, and with it all later ones."""
    module = os if call == "rename" else shutil
    plain = getattr(module, call)
    path = tmp_path / checkpoint_name(1)
    for first_bad in range(1, 20):
        save_value(path, 1.0, group)
        failing = failing_from(first_bad, plain, how, tmp_path)
        monkeypatch.setattr(module, call, failing)
        done = False
        try:
            save_value(path, 2.0, group)
            done = True
        except (CheckpointError, Killed):
            pass
        monkeypatch.setattr(module, call, plain)
        assert loaded_value(latest_checkpoint(tmp_path), group) in ((2.0,) if done else (1.0, 2.0))
        save_value(path, 3.0, group)
        assert loaded_value(path, group) == 3.0
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
        if done:
            break
    assert 1 < first_bad < 19


def test_a_folder_has_its_name_only_when_every_byte_in_it_was_synced(
    tmp_path, group, monkeypatch
) -> None:
    """Sizes at the time of the sync: what was still in a buffer is not on the disk."""
    path, events = tmp_path / checkpoint_name(1), []
    size_of: dict[int, int] = {}
    fsync, rename = os.fsync, os.rename

    def noting_fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        size_of[found.st_ino] = found.st_size
        events.append(found.st_ino)
        fsync(descriptor)

    def noting_rename(source: Any, target: Any) -> None:
        events.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    save_value(path, 1.0, group)
    files = [file.stat() for file in path.iterdir()]
    named = events.index(path.name)
    assert {file.st_ino for file in files} <= set(events[:named])
    assert all(size_of[file.st_ino] == file.st_size > 0 for file in files)
    assert events[named - 1] == path.stat().st_ino, "the names in the folder come last"
    assert events[named + 1] == tmp_path.stat().st_ino


def test_what_killed_saves_and_prunes_left_is_removed_by_the_next(tmp_path, group) -> None:
    def leave() -> None:
        for name in (".step-000001.unfinished", ".step-000002.removed", ".step-000003.old.removed"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "x").touch()
        (tmp_path / "notes").mkdir(exist_ok=True)

    leave()
    for step in (1, 2):
        save_value(tmp_path / checkpoint_name(step), step, group)
    os.rename(tmp_path / checkpoint_name(1), tmp_path / f"{checkpoint_name(1)}.old")
    shutil.copytree(tmp_path / checkpoint_name(2), tmp_path / f"{checkpoint_name(2)}.old")
    leave()
    prune_checkpoints(tmp_path, keep=2)
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert left == ["notes", "step-000001.old", "step-000002"]
    leave()
    save_value(tmp_path / checkpoint_name(3), 3.0, group)
    prune_checkpoints(tmp_path, keep=1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes", "step-000003"]
