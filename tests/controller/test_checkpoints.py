"""How a run follows its checkpoints: told when complete, waited for at the end, errors heard."""

from pathlib import Path
from typing import Any

import pytest

from shardloop.checkpoint import SaveReport
from shardloop.config import CheckpointConfig
from shardloop.controller.checkpoints import Checkpoints
from shardloop.controller.events import Saved
from shardloop.errors import CheckpointError, RewardError, TaskError, WorkerDied
from tests.controller.fakes import InProcessGroup

RUN = Path("run")
FIRST, SECOND = Saved("checkpoint", RUN / "step-000001"), Saved("checkpoint", RUN / "step-000002")


class SavingRank:
    """Writes until it is told that it is done."""

    def __init__(self) -> None:
        self.done = False
        self.fault: CheckpointError | None = None
        self.calls: list[dict[str, Any]] = []
        self.complete: list[str] = []

    def save(self, path: Path, **options: Any) -> None:
        self.path, self.done = path, not options["background"]
        self.calls.append(options)

    def is_saving(self) -> bool:
        return not self.done

    def finish_save(self) -> SaveReport:
        if self.fault is not None:
            raise self.fault
        self.complete.append(self.path.name)
        return SaveReport(path=self.path, stall_s=1.0, wait_s=2.0, write_s=4.0)


def made(num_ranks: int = 2, **settings: Any) -> tuple[Checkpoints, InProcessGroup]:
    ranks = InProcessGroup(*(SavingRank() for _ in range(num_ranks)))
    return Checkpoints(ranks, RUN, CheckpointConfig(**settings)), ranks  # type: ignore[arg-type]


def test_a_checkpoint_is_told_of_when_all_ranks_have_written_it() -> None:
    checkpoints, ranks = made(keep=3)
    assert list(checkpoints.news()) == list(checkpoints.save(1)) == []
    assert ranks.objects[0].calls == [{"extra": {"step": 1}, "keep": 3, "background": True}]
    assert list(checkpoints.news()) == []
    ranks.objects[0].done = True
    assert list(checkpoints.news()) == [], "the other rank still writes"
    ranks.objects[1].done = True
    assert checkpoints.seconds() == {}
    assert list(checkpoints.news()) == [FIRST]
    assert checkpoints.seconds() == {
        "checkpoint_seconds": {"stall": 1.0, "wait": 2.0, "write": 4.0}
    }
    assert checkpoints.seconds() == {}, "counted once"
    assert list(checkpoints.news()) == list(checkpoints.finish()) == []


def test_a_second_checkpoint_waits_for_the_first_and_the_seconds_of_both_count() -> None:
    checkpoints, ranks = made()
    list(checkpoints.save(1))
    assert list(checkpoints.save(2)) == [FIRST]
    assert list(checkpoints.finish()) == [SECOND]
    assert ranks.calls == ["save", "finish_save", "save", "finish_save"]
    assert checkpoints.seconds() == {
        "checkpoint_seconds": {"stall": 2.0, "wait": 4.0, "write": 8.0}
    }


def test_without_background_a_checkpoint_is_complete_at_once() -> None:
    checkpoints, _ = made(background=False)
    assert list(checkpoints.save(1)) == [FIRST]


@pytest.mark.parametrize("ask", ["news", "finish", "save"])
def test_a_checkpoint_that_failed_in_the_background_ends_the_run(ask: str) -> None:
    checkpoints, ranks = made()
    list(checkpoints.save(1))
    for rank in ranks.objects:
        rank.done, rank.fault = True, CheckpointError("disk full")
    with pytest.raises(CheckpointError, match="disk full"):
        list(getattr(checkpoints, ask)(*([2] if ask == "save" else [])))
    assert ranks.calls.count("save") == 1


@pytest.mark.parametrize("fault", [RewardError("r"), TaskError("t"), WorkerDied("w")])
def test_a_run_that_ends_by_a_fault_keeps_its_last_checkpoint_if_its_ranks_are_well(
    fault: Exception,
) -> None:
    checkpoints, ranks = made()
    with pytest.raises(type(fault)), checkpoints.completed():
        list(checkpoints.save(1))
        raise fault
    for rank in ranks.objects:
        assert rank.complete == ([] if isinstance(fault, WorkerDied) else ["step-000001"])
