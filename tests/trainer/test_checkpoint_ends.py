"""A world that ends while a checkpoint is written in the background: nothing half, no hang."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardloop.checkpoint import Saver, latest_checkpoint, writing
from shardloop.config import WorkersConfig
from shardloop.controller.groups import LocalWorkers
from shardloop.errors import PolicyDiverged
from shardloop.parallel.context import RankContext
from tests.harness import run_ranks
from tests.trainer.saving import loaded_value

SAVED, LOST = "step-000001", "step-000002"
ROLES = {"all": (0, 1)}


def begin_to_save(context: RankContext, run: Path) -> None:
    """One checkpoint is complete and the next under way, for good, when this returns."""
    saver = context.objects["saver"] = Saver(dist.group.WORLD, timeout_s=600.0)
    options: Any = {"version": 1, "extra": {"step": 1}, "keep": None, "background": True}
    saver.save(run / SAVED, {"w": torch.ones(3)}, **options)
    saver.finish()
    begun, plain = threading.Event(), writing.write_shards

    def endless(*arguments: Any) -> None:
        plain(*arguments)
        begun.set()
        threading.Event().wait()

    writing.write_shards = endless
    saver.save(run / LOST, {"w": torch.zeros(3)}, **options)
    assert begun.wait(60.0)


def diverge(context: RankContext, run: Path) -> None:
    begin_to_save(context, run)
    raise PolicyDiverged("weights that are not finite")


def load(_: RankContext, run: Path) -> float:
    return loaded_value(latest_checkpoint(run), dist.group.WORLD)


def assert_only_the_complete_one_is_there(run: Path) -> None:
    assert (run / f".{LOST}.unfinished").is_dir(), "it was being written"
    assert latest_checkpoint(run) == run / SAVED
    assert not (run / LOST).exists()
    assert run_ranks(load, 2, run) == [1.0, 1.0]


@pytest.mark.parametrize("interrupt", [False, True])
def test_workers_that_are_stopped_amid_a_save_leave_the_checkpoint_before(
    tmp_path: Path, interrupt: bool
) -> None:
    """By the end of their block, or by Ctrl-C: no process stays, and nobody waits for the save."""
    workers = LocalWorkers(ROLES, WorkersConfig(timeout_s=60.0))
    try:
        with workers:
            workers.run(begin_to_save, tmp_path, role="all")
            pids = workers.pids().values()
            if interrupt:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert interrupt
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    assert_only_the_complete_one_is_there(tmp_path)


def test_a_policy_that_diverges_amid_a_save_is_the_error_and_leaves_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    with pytest.raises(PolicyDiverged, match="not finite"):
        run_ranks(diverge, 2, tmp_path)
    assert_only_the_complete_one_is_there(tmp_path)
