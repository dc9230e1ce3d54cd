"""Sleep gives memory back for good, and waking never runs on weights that are not there."""

import pytest
import torch

from shardloop.engines.gate import NO_WEIGHTS
from shardloop.errors import PolicyDiverged, UsageError
from tests.engines.models import empty_engine, make_engine, make_requests, weights_of
from tests.engines.test_local import LLAMA, run_out, same
from tests.engines.test_resume import in_order

SAMPLING = {"max_tokens": 6, "temperature": 0.9}


def cache_bytes(engine) -> int:
    return engine._slots.kv_L2SKCE.untyped_storage().nbytes()


def weight_bytes(engine) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in engine.tensors().values())


def midway(requests, *, steps: int = 2, max_slots: int = 4):
    engine = make_engine("llama", max_slots=max_slots)
    engine.submit(requests)
    assert [engine.step() for _ in range(steps)] == [[]] * steps
    return engine


def test_cache_sleep_frees_keys_values_and_prompts_and_loses_no_request():
    requests = make_requests(prompts=3, samples=2, **SAMPLING)
    engine = midway(requests)
    full = cache_bytes(engine)
    engine.sleep("cache")
    assert (cache_bytes(engine), len(engine._prefixes)) == (0, 0)
    assert weight_bytes(engine) > 0
    for call in (engine.step, lambda: engine.generate([])):
        with pytest.raises(UsageError, match=r"while asleep \(level='cache'\); call wake first"):
            call()
    engine.wake()
    assert cache_bytes(engine) == full
    same(in_order(run_out(engine), requests), make_engine("llama").generate(requests))


def test_requests_come_and_go_while_the_engine_sleeps():
    requests = make_requests(prompts=3, samples=2, **SAMPLING)
    engine = midway(requests[:4], max_slots=3)
    engine.sleep("cache")
    engine.submit(requests[4:])
    running, queued = engine.abort([requests[0].sample_id, requests[3].sample_id])
    assert (len(running.token_ids_T), len(queued.token_ids_T)) == (2, 0)
    engine.resume([queued, running])
    assert cache_bytes(engine) == 0
    engine.wake()
    same(in_order(run_out(engine), requests), make_engine("llama").generate(requests))


def test_a_discarding_sleep_refuses_to_run_until_an_update_is_committed():
    requests = make_requests(prompts=2, samples=2, **SAMPLING)
    engine = midway(requests)
    pointers = {name: id(t.untyped_storage()) for name, t in engine.tensors().items()}
    engine.sleep("weights")
    assert (cache_bytes(engine), weight_bytes(engine)) == (0, 0)
    with pytest.raises(UsageError, match=r"while asleep \(level='weights'\)"):
        engine.step()
    engine.wake()
    assert pointers.keys() == engine.tensors().keys()
    for call in (engine.step, lambda: engine.generate([])):
        with pytest.raises(UsageError, match=r"gave up the weights of version=0.*begin_update"):
            call()
    engine.begin_update(1)
    with pytest.raises(PolicyDiverged, match="not written"):
        engine.commit_update()
    engine.load_from_state_dict(weights_of("llama"), version=1)
    ours = in_order(run_out(engine), requests)
    same(ours, make_engine("llama").generate(requests))
    assert {completion.version_T for completion in ours} == {(0, 0, 1, 1, 1, 1)}


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_an_update_reaches_a_sleeping_engine_through_tensors_taken_before(kind):
    engine, donor = make_engine(kind, max_slots=4), make_engine(kind, seed=1)
    requests = make_requests(prompts=2, samples=2, **SAMPLING)
    engine.submit(requests)
    engine.step()
    engine.sleep("weights")
    views = engine.tensors()
    engine.begin_update(3)
    assert all(tensor.isnan().any() for tensor in views.values())
    engine.write((views[name], tensor) for name, tensor in donor.tensors().items())
    engine.commit_update()
    with pytest.raises(UsageError, match=r"while asleep \(level='cache'\)"):
        engine.step()
    assert cache_bytes(engine) == 0
    engine.wake()
    ours = in_order(run_out(engine), requests)
    assert {completion.version_T for completion in ours} == {(0, 3, 3, 3, 3, 3)}
    again = engine.generate(requests)
    same(again, donor.generate(requests))


def test_padding_of_the_vocabulary_survives_a_discarding_sleep():
    engine = make_engine("llama", comm=Quarter())
    before = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    assert (before["lm_head.weight"] == 0).all(-1).any(), "37 ids make 4 x 10 rows"
    engine.sleep("weights")
    engine.wake()
    engine.load_from_state_dict(weights_of("llama"), version=1)
    for name, tensor in engine.tensors().items():
        assert torch.equal(tensor, before[name]), name


class Quarter:
    """The last of four ranks, which is never asked to communicate."""

    rank, size = 3, 4


def test_sleep_deepens_and_waking_twice_is_waking_once():
    engine = make_engine("llama")
    engine.wake()
    engine.sleep("cache")
    engine.sleep("weights")
    engine.sleep("cache")
    assert weight_bytes(engine) == 0
    with pytest.raises(UsageError, match=r"asleep \(level='weights'\)"):
        engine.step()
    engine.load_from_state_dict(weights_of("llama"), version=2)
    engine.wake()
    engine.wake()
    assert len(engine.generate(make_requests(prompts=1, samples=1))) == 1


def test_sleep_is_refused_within_an_update_and_at_an_unknown_level():
    engine = make_engine("llama")
    with pytest.raises(UsageError, match="level='deep'; choose cache or weights"):
        engine.sleep("deep")
    engine.begin_update(1)
    with pytest.raises(UsageError, match="update to version=1 is open"):
        engine.sleep("weights")
    assert weight_bytes(engine) > 0


def test_an_engine_that_never_had_weights_may_sleep_before_its_first_update():
    engine = empty_engine(LLAMA)
    engine.sleep("weights")
    engine.wake()
    assert engine.version == NO_WEIGHTS
    with pytest.raises(UsageError, match="without weights"):
        engine.step()
    engine.load_from_state_dict(weights_of("llama"))
    assert engine.step() == []
