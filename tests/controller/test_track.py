"""Metrics reach a dashboard as numbers by name and step."""

from pathlib import Path

import pytest

from shardloop.controller.track import flat, open_sink


def test_nested_numbers_are_named_by_their_path() -> None:
    assert flat({"reward": 1, "seconds": {"sync": 0.5, "rollout": 2}}) == {
        "reward": 1.0,
        "seconds/sync": 0.5,
        "seconds/rollout": 2.0,
    }


@pytest.mark.optional
def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = open_sink("tensorboard", tmp_path)
    for step in (1, 2):
        sink.write(step, {"reward": step / 4, "seconds": {"sync": 0.5}})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25), (2, 0.5)]
    assert [e.value for e in events.Scalars("seconds/sync")] == [0.5, 0.5]
