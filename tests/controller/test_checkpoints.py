"""How a run follows its checkpoints: told when complete, waited for at the end, errors heard."""

from pathlib import Path
from typing import Any

import pytest

from shardloop.checkpoint import SaveReport
from shardloop.checkpoint.notes import TRAINER_FILE
from shardloop.config import CheckpointConfig
from shardloop.controller.checkpoints import Checkpoints
from shardloop.controller.events import Saved
from shardloop.errors import (
    CheckpointError,
    PolicyDiverged,
    RewardError,
    TaskError,
    WorkerDied,
)
from tests.controller.fakes import InProcessGroup

RUN = Path("run")
FIRST, SECOND = Saved("checkpoint", RUN / "step-000001"), Saved("checkpoint", RUN / "step-000002")


class SavingRank:
    """Writes until it is told that it is done."""

    def __init__(self) -> None:
        self.done = False
        self.fault: Exception | None = None
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


@pytest.mark.parametrize("fault", [RewardError("r"), TaskError("t"), AssertionError("a")])
def test_a_run_that_ends_by_a_fault_keeps_its_last_checkpoint_if_its_ranks_are_well(
    fault: Exception,
) -> None:
    checkpoints, ranks = made()
    with pytest.raises(type(fault)) as caught, checkpoints.completed():
        list(checkpoints.save(1))
        raise fault
    assert [rank.complete for rank in ranks.objects] == [["step-000001"]] * 2
    assert str(caught.value) == fault.args[0] and not hasattr(fault, "__notes__")


def test_a_checkpoint_that_is_lost_with_its_ranks_is_named_behind_the_cause() -> None:
    checkpoints, ranks = made()
    with pytest.raises(PolicyDiverged) as caught, checkpoints.completed():
        list(checkpoints.save(1))
        ranks.is_alive = False
        raise PolicyDiverged("not finite")
    text = str(caught.value)
    assert text.startswith("not finite\n") and "run/step-000001 was not complete yet" in text
    assert "finish_save" not in ranks.calls, "nobody would answer"


@pytest.mark.parametrize("fault", [WorkerDied("killed"), CheckpointError("disk full")])
def test_what_ends_the_wait_for_a_checkpoint_is_said_once(fault: Exception) -> None:
    """A rank that dies takes the checkpoint with it; a checkpoint that fails says so itself."""
    checkpoints, ranks = made()
    with pytest.raises(type(fault)) as caught, checkpoints.completed():
        list(checkpoints.save(1))
        for rank in ranks.objects:
            rank.fault = fault
        ranks.is_alive = False
        list(checkpoints.finish())
    is_lost = "run/step-000001 was not complete yet" in str(caught.value)
    assert is_lost == isinstance(fault, WorkerDied)
    assert str(caught.value).startswith(str(fault).splitlines()[0])


def test_a_checkpoint_that_fails_besides_keeps_the_error_of_the_run() -> None:
    """An error of ours tells it in its text, any other in a note."""
    for fault in (RewardError("the reward broke"), ValueError("a fault of ours")):
        checkpoints, ranks = made()
        with pytest.raises(type(fault), match=str(fault)) as caught, checkpoints.completed():
            list(checkpoints.save(1))
            for rank in ranks.objects:
                rank.fault = CheckpointError("disk full")
            raise fault
        notes = getattr(fault, "__notes__", [str(caught.value)])
        assert "disk full" in notes[-1]


def test_a_checkpoint_that_was_completed_meanwhile_is_not_called_lost(tmp_path: Path) -> None:
    ranks = InProcessGroup(SavingRank())
    checkpoints = Checkpoints(ranks, tmp_path, CheckpointConfig())  # type: ignore[arg-type]
    with pytest.raises(WorkerDied) as caught, checkpoints.completed():
        list(checkpoints.save(1))
        (tmp_path / "step-000001").mkdir()
        (tmp_path / "step-000001" / TRAINER_FILE).touch()
        ranks.is_alive = False
        raise WorkerDied("killed")
    assert str(caught.value) == "killed"
