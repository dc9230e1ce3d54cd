"""The scripted engine keeps the protocol's life cycle."""

import pytest

from shardloop.engines.gate import NO_WEIGHTS
from shardloop.engines.scripted import ScriptedEngine
from shardloop.errors import UsageError
from shardloop.types import Request, SampleId, Sampling


def request(index: int, *, max_tokens: int = 4, stops: tuple[int, ...] = ()) -> Request:
    return Request(
        prompt_ids=(index + 1,),
        sampling=Sampling(max_tokens=max_tokens, stop_token_ids=stops),
        sample_id=SampleId(prompt_uid="p", index=index),
        seed=0,
    )


def count_up(request: Request) -> list[int]:
    return list(range(request.prompt_ids[0], request.prompt_ids[0] + 6))


def test_answers_follow_the_script_in_request_order_and_say_why_they_ended():
    engine = ScriptedEngine(count_up, logprob=-0.5)
    cut, stopped = engine.generate([request(1, max_tokens=3), request(0, stops=(2,))])
    assert (cut.token_ids_T, cut.finish_reason) == ((2, 3, 4), "length")
    assert (stopped.token_ids_T, stopped.finish_reason) == ((1, 2), "stop")
    assert cut.behave_T == cut.full_T == (-0.5,) * 3
    (short,) = ScriptedEngine(lambda _: [9]).generate([request(0)])
    assert (short.token_ids_T, short.finish_reason) == ((9,), "stop")


def test_each_token_carries_the_version_of_its_step():
    engine = ScriptedEngine(count_up)
    engine.submit([request(0)])
    engine.step()
    engine.begin_update(1)
    with pytest.raises(UsageError, match="update to version=1 is open"):
        engine.step()
    engine.commit_update()
    finished = [completion for _ in range(3) for completion in engine.step()]
    assert [completion.version_T for completion in finished] == [(0, 1, 1, 1)]


def test_life_cycle_errors_are_those_of_a_real_engine():
    fresh = ScriptedEngine(count_up, version=None)
    assert fresh.version == NO_WEIGHTS
    with pytest.raises(UsageError, match="without weights"):
        fresh.generate([request(0)])
    engine = ScriptedEngine(count_up, max_model_len=4)
    with pytest.raises(UsageError, match="exceed the context of 4"):
        engine.submit([request(0)])
    with pytest.raises(UsageError, match="no token"):
        ScriptedEngine(lambda _: []).submit([request(0)])


def test_aborted_requests_return_their_tokens_and_others_go_on():
    engine = ScriptedEngine(count_up)
    engine.submit([request(0), request(1)])
    engine.step()
    (gone,) = engine.abort([request(0).sample_id])
    assert (gone.token_ids_T, gone.finish_reason) == ((1,), "aborted")
    with pytest.raises(UsageError, match="not in flight"):
        engine.abort([request(0).sample_id])
    ours = engine.generate([request(2, max_tokens=5)])
    assert [c.token_ids_T for c in ours] == [(3, 4, 5, 6, 7)]
    assert [c.token_ids_T for c in engine.step()] == [(2, 3, 4, 5)]


def test_resumed_requests_keep_their_tokens_and_the_script_goes_on():
    engine = ScriptedEngine(count_up, logprob=-0.5)
    engine.submit([request(0), request(1)])
    engine.step()
    gone = engine.abort([request(0).sample_id, request(1).sample_id])
    other = ScriptedEngine(count_up, logprob=-2.0, version=3)
    other.resume(gone)
    finished = [completion for _ in range(3) for completion in other.step()]
    assert [c.token_ids_T for c in finished] == [(1, 2, 3, 4), (2, 3, 4, 5)]
    assert {c.version_T for c in finished} == {(0, 3, 3, 3)}
    assert {c.behave_T for c in finished} == {(-0.5, -2.0, -2.0, -2.0)}
    with pytest.raises(UsageError, match="resume what abort returned"):
        other.resume(finished)


def test_sleep_is_that_of_a_real_engine():
    engine = ScriptedEngine(count_up)
    engine.submit([request(0)])
    engine.step()
    engine.sleep("cache")
    with pytest.raises(UsageError, match="while asleep"):
        engine.step()
    engine.wake()
    engine.step()
    engine.sleep("weights")
    engine.wake()
    with pytest.raises(UsageError, match="gave up the weights of version=0"):
        engine.step()
    engine.begin_update(1)
    engine.commit_update()
    assert [c.version_T for _ in range(2) for c in engine.step()] == [(0, 0, 1, 1)]


def test_stop_texts_end_an_answer_where_there_is_a_decoder():
    def decode(ids) -> str:
        return "".join(map(str, ids))

    asking = Request(
        prompt_ids=(1,),
        sampling=Sampling(max_tokens=6, stop=("34",)),
        sample_id=request(0).sample_id,
        seed=0,
    )
    (ours,) = ScriptedEngine(count_up, decode=decode).generate([asking])
    assert (ours.token_ids_T, ours.finish_reason) == ((1, 2, 3, 4), "stop")
    with pytest.raises(UsageError, match="cannot decode tokens"):
        ScriptedEngine(count_up).submit([asking])
