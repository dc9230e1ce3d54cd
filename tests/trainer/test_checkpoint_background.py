"""Checkpoints that are written while training goes on: the same folders, whole, in turn, loud."""

import os
import pickle
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.checkpoint import Saver, latest_checkpoint, load_checkpoint, writing
from shardloop.errors import ShardloopError, WorkerDied
from shardloop.parallel.context import RankContext
from tests.harness import run_ranks
from tests.models import make_folder
from tests.trainer.saving import (
    files_of_at_most,
    make_trainer,
    message,
    train,
    whole_state,
)

WAIT_S = 30.0
"""For something that happens in any case, if the code is right."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), head_dim=2)


@contextmanager
def writing_held_until(permission: threading.Event) -> Iterator[None]:
    """This rank's thread does not begin to write its shards before."""
    plain = writing.write_shards

    def held(*args: Any) -> None:
        assert permission.wait(WAIT_S)
        plain(*args)

    writing.write_shards = held
    try:
        yield
    finally:
        permission.set()
        writing.write_shards = plain


def train_while_saving(context: RankContext, folder: Path, run: Path) -> dict[str, Any]:
    """Rank 1 begins to write only when both ranks have trained on."""
    trainer = make_trainer(context, folder)
    train(trainer, range(2))
    saved, facts = whole_state(trainer), {}
    permission = threading.Event()
    if context.rank == 0:
        permission.set()
    with writing_held_until(permission):
        trainer.save(run / "step-000002", extra={"step": 2}, background=True)
        train(trainer, range(2, 8))
        dist.barrier()
        facts["writes while it trains"] = trainer.is_saving()
        facts["latest meanwhile"] = latest_checkpoint(run)
        dist.barrier()
        permission.set()
        report = trainer.finish_save()
    facts["latest"] = latest_checkpoint(run)
    facts["reported"] = report.path
    facts["again"] = (trainer.is_saving(), trainer.finish_save())
    facts["seconds in order"] = min(report.stall_s, report.write_s) > 0
    facts["extra"] = trainer.load(run / "step-000002")
    loaded = whole_state(trainer)
    facts["wrong"] = [key for key in saved if not torch.equal(loaded[key], saved[key])]
    trainer.save(run / "step-000003", extra={"step": 2})
    return facts


def test_training_goes_on_while_a_checkpoint_of_before_is_written(folder, tmp_path) -> None:
    """No collective of the training waits for one of the save, and no name comes too early."""
    for facts in run_ranks(train_while_saving, 2, folder, tmp_path):
        assert facts["writes while it trains"]
        assert facts["latest meanwhile"] is None
        assert facts["latest"] == facts["reported"] == tmp_path / "step-000002"
        assert facts["again"] == (False, None)
        assert facts["seconds in order"]
        assert facts["extra"] == {"step": 2}
        assert facts["wrong"] == []
    assert_equal_folders(tmp_path / "step-000002", tmp_path / "step-000003")


def assert_equal_folders(one: Path, other: Path) -> None:
    """Bit for bit, but for the name of the folder and the id of the save in the metadata."""
    names = [sorted(path.name for path in folder.iterdir()) for folder in (one, other)]
    assert names[0] == names[1] and len(names[0]) == 5
    for name in set(names[0]) - {".metadata"}:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    read = [pickle.loads((folder / ".metadata").read_bytes()) for folder in (one, other)]
    assert read[0].state_dict_metadata == read[1].state_dict_metadata
    assert read[0].storage_data == read[1].storage_data


def failures(context: RankContext, folder: Path, run: Path) -> dict[str, Any]:
    trainer, facts = make_trainer(context, folder), {}
    train(trainer, range(1))
    trainer.save(run / "step-000001", background=True)
    trainer.finish_save()
    limit = 2000 if context.rank == 1 else 10**9
    for step, ask in ((2, trainer.finish_save), (3, lambda: trainer.save(run / "step-000004"))):
        with files_of_at_most(limit):
            trainer.save(run / f"step-00000{step}", background=True)
            train(trainer, range(1))
            while trainer.is_saving():
                time.sleep(0.01)
        facts[f"full disk {step}"] = message(ask)
        facts[f"left {step}"] = sorted(path.name for path in run.iterdir())
        facts[f"said once {step}"] = message(trainer.finish_save) is None
        dist.barrier()
    facts["no data"] = message(
        lambda: trainer.save(run / "step-000005", extra={"x": {1, 2}}, background=True)
    )
    facts["load"] = message(lambda: trainer.load(run / "step-000001"))
    trainer.save(run / "step-000006", background=True, keep=1)
    trainer.finish_save()
    facts["left at last"] = sorted(path.name for path in run.iterdir())
    return facts


def test_an_error_in_the_background_is_raised_on_every_rank_at_the_next_save_or_the_end(
    folder, tmp_path
) -> None:
    for facts in run_ranks(failures, 2, folder, tmp_path):
        for step in (2, 3):
            text = facts[f"full disk {step}"]
            assert text is not None and text.startswith(str(tmp_path / f"step-00000{step}: "))
            assert "File too large" in text and "earlier checkpoints are intact" in text
            assert facts[f"left {step}"] == ["step-000001"]
            assert facts[f"said once {step}"]
        assert "not JSON serializable" in facts["no data"]
        assert facts["load"] is None
        assert facts["left at last"] == ["step-000006"], "retention is part of the save"


def save_one(saver: Saver, run: Path, step: int, state: dict[str, Tensor]) -> None:
    path = run / f"step-{step:06d}"
    saver.save(path, state, version=step, extra={}, keep=None, background=True)


def die_while_saving(context: RankContext, run: Path) -> None:
    saver = Saver(dist.group.WORLD, timeout_s=WAIT_S)
    if context.rank == 1:
        writing.write_shards = lambda *_: os._exit(0)
    save_one(saver, run, 1, {"w": torch.ones(3)})
    saver.finish()


def test_a_rank_that_dies_while_it_writes_is_named_and_leaves_no_checkpoint(tmp_path) -> None:
    with pytest.raises(WorkerDied, match="rank 1 "):
        run_ranks(die_while_saving, 2, tmp_path)
    assert latest_checkpoint(tmp_path) is None


def hang_while_saving(context: RankContext, run: Path) -> tuple[str, float]:
    """The thread of rank 1 does not answer; the training's own messages still arrive."""
    saver = Saver(dist.group.WORLD, timeout_s=1.0)
    if context.rank == 1:
        writing.write_shards = lambda *_: time.sleep(4.0)
    save_one(saver, run, 1, {"w": torch.ones(3)})
    try:
        saver.finish()
        error = "none"
    except ShardloopError as found:
        error = f"{type(found).__name__}: {found}"
    ones = torch.ones(3)
    dist.all_reduce(ones)
    return error, float(ones.sum())


def test_a_thread_that_does_not_answer_is_a_named_error_and_training_still_works(tmp_path) -> None:
    for error, total in run_ranks(hang_while_saving, 2, tmp_path):
        assert re.match("Worker(Timeout|Died): saving .*step-000001: ", error), error
        assert total == 6.0
    assert latest_checkpoint(tmp_path) is None


def test_a_second_save_waits_for_the_first_and_uses_its_memory_again(tmp_path, group) -> None:
    saver, weight = Saver(group, timeout_s=WAIT_S), torch.zeros(1000)
    permission = threading.Event()
    release = threading.Timer(0.5, permission.set)
    with writing_held_until(permission):
        save_one(saver, tmp_path, 1, {"w": weight})
        weight.fill_(2.0)
        release.start()
        buffers = {key: value.data_ptr() for key, value in saver._staging._buffers.items()}
        save_one(saver, tmp_path, 2, {"w": weight})
        assert latest_checkpoint(tmp_path) is not None, "the first is complete by now"
        weight.fill_(3.0)
        report = saver.finish()
    assert report is not None and report.path.name == "step-000002"
    assert {key: value.data_ptr() for key, value in saver._staging._buffers.items()} == buffers
    for step, value in ((1, 0.0), (2, 2.0)):
        state = {"w": torch.full((1000,), -1.0)}
        load_checkpoint(tmp_path / f"step-{step:06d}", state, group=group)
        assert state["w"].unique().tolist() == [value]


def test_tensors_of_any_strides_and_sizes_are_written_as_they_are(tmp_path, group, seed) -> None:
    wide = torch.randn(6, 8)
    state = {
        "part of a storage": wide[2:4],
        "transposed": torch.randn(3, 5).T,
        "every other": wide[:, ::2],
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.0),
        "integers": torch.arange(5),
        "half": torch.randn(7).to(torch.bfloat16),
    }
    saver = Saver(group, timeout_s=WAIT_S)
    save_one(saver, tmp_path, 1, state)
    saver.finish()
    loaded = {key: torch.zeros_like(value) for key, value in state.items()}
    load_checkpoint(tmp_path / "step-000001", loaded, group=group)
    assert all(torch.equal(loaded[key], state[key]) for key in state)
