"""An update that is cancelled before anything was written: the engine goes on as it was."""

import pytest

from shardloop.engines import local
from shardloop.errors import UsageError
from tests.engines.models import make_engine, make_requests, weights_of
from tests.engines.test_local import run_out, same

SAMPLING = {"max_tokens": 6, "temperature": 1.0}


def test_after_a_cancelled_update_requests_in_flight_go_on_with_the_old_weights():
    requests = make_requests(prompts=2, samples=2, **SAMPLING)
    engine = make_engine("llama", max_slots=4)
    engine.submit(requests)
    engine.step()
    engine.begin_update(1)
    with pytest.raises(UsageError, match="is open and half written"):
        engine.step()
    engine.cancel_update()
    by_id = {completion.request.sample_id: completion for completion in run_out(engine)}
    ours = [by_id[request.sample_id] for request in requests]
    same(ours, make_engine("llama").generate(requests))
    assert {completion.version_T for completion in ours} == {(0,) * 6}


def test_no_cancelling_lets_half_written_weights_run():
    engine = make_engine("llama")
    engine.begin_update(1)
    engine.write([(view, view.neg()) for view in [engine.tensors()["model.norm.weight"]]])
    for _ in range(2):
        engine.begin_update(2)
        engine.cancel_update()
        with pytest.raises(UsageError, match="version=2 is open and half written"):
            engine.generate([])
    engine.load_from_state_dict(weights_of("llama"), version=2)
    engine.begin_update(3)
    engine.cancel_update()
    requests = make_requests(prompts=1, samples=2, **SAMPLING)
    same(engine.generate(requests), make_engine("llama").generate(requests))
    assert engine.version == 2


def test_weights_that_a_sleep_gave_up_do_not_come_back_by_cancelling():
    engine = make_engine("llama")
    engine.sleep("weights")
    engine.begin_update(1)
    engine.cancel_update()
    engine.wake()
    with pytest.raises(UsageError, match="gave up the weights of version=0"):
        engine.generate([])


def test_cancelling_without_an_update_is_refused():
    with pytest.raises(UsageError, match="cancel_update outside an update"):
        make_engine("llama").cancel_update()


def test_an_update_that_cannot_begin_is_not_open(monkeypatch):
    requests = make_requests(prompts=1, samples=2, **SAMPLING)
    engine, other = make_engine("llama"), make_engine("llama")

    def no_memory(*_):
        raise MemoryError("no room for the weights")

    monkeypatch.setattr(local, "restore_memory", no_memory)
    with pytest.raises(MemoryError):
        engine.begin_update(1)
    same(engine.generate(requests), other.generate(requests))
