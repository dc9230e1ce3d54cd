"""Aborted completions go on as if nothing had happened, or under new weights and say so."""

from collections import Counter
from dataclasses import replace

import pytest

from shardloop.errors import UsageError
from shardloop.types import Completion, Request
from tests.engines.models import VOCAB, make_engine, make_requests, run_threads, weights_of
from tests.engines.test_local import run_out, same

SAMPLING = {"max_tokens": 8, "temperature": 0.9, "top_p": 0.95, "stop_token_ids": (3, 7)}


def in_order(completions: list[Completion], requests: list[Request]) -> list[Completion]:
    return sorted(completions, key=lambda completion: requests.index(completion.request))


def interrupted(requests, *, after: int, max_slots: int, **options) -> list[Completion]:
    """All aborted after some steps and resumed on another engine; completions in request order."""
    engine = make_engine("qwen3", max_slots=max_slots, **options)
    engine.submit(requests)
    finished = [completion for _ in range(after) for completion in engine.step()]
    ended = {completion.request.sample_id for completion in finished}
    gone = engine.abort([r.sample_id for r in requests if r.sample_id not in ended])
    assert engine.num_in_flight == 0
    other = make_engine("qwen3", max_slots=max_slots, **options)
    other.resume(gone)
    return in_order(finished + run_out(other), requests)


@pytest.mark.parametrize("max_slots", [3, 16])
@pytest.mark.parametrize("after", [0, 1, 3, 6])
def test_abort_and_resume_equal_a_run_without_them(after, max_slots):
    requests = make_requests(prompts=3, samples=2, **SAMPLING)
    whole = make_engine("qwen3", max_slots=max_slots).generate(requests)
    ours = interrupted(requests, after=after, max_slots=max_slots)
    same(ours, whole)
    assert [c.version_T for c in ours] == [c.version_T for c in whole]


def test_abort_and_resume_after_every_step_equal_a_run_without_them():
    requests = make_requests(prompts=2, samples=2, **SAMPLING)
    engine, finished = make_engine("qwen3", max_slots=3), []
    engine.submit(requests)
    while engine.num_in_flight:
        finished += engine.step()
        ended = {completion.request.sample_id for completion in finished}
        engine.resume(engine.abort([r.sample_id for r in requests if r.sample_id not in ended]))
    same(in_order(finished, requests), make_engine("qwen3").generate(requests))
    assert engine._prefixes._users == Counter()


def test_every_rank_resumes_alike():
    requests = make_requests(prompts=2, samples=2, **SAMPLING)
    whole = make_engine("qwen3").generate(requests)
    for ours in run_threads(lambda comm: interrupted(requests, after=2, max_slots=3, comm=comm), 2):
        same(ours, whole)


def test_what_resumes_under_new_weights_says_so_and_is_what_they_give():
    requests = make_requests(prompts=2, samples=3, max_tokens=7, temperature=0.8)
    engine = make_engine("llama", max_slots=4)
    engine.submit(requests)
    for _ in range(3):
        engine.step()
    old = engine.abort([request.sample_id for request in requests])
    engine.load_from_state_dict(weights_of("llama", 1), version=6)
    engine.resume(old)
    ours = in_order(run_out(engine), requests)
    for before, after in zip(old, ours, strict=True):
        num_old = len(before.token_ids_T)
        assert after.token_ids_T[:num_old] == before.token_ids_T
        assert after.behave_T[:num_old] == before.behave_T
        assert after.version_T == (0,) * num_old + (6,) * (7 - num_old)
    # No key, value or prompt of the old weights has a part in the new tokens.
    fresh = make_engine("llama", seed=1)
    fresh.resume(old)
    same(ours, in_order(run_out(fresh), requests), atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": "stop"}, "ended with finish_reason='stop'; resume what abort returned"),
        ({"request": {"max_tokens": 2}}, "it has 2 tokens of max_tokens=2"),
        ({"loss_mask_T": (1, 0)}, "tokens that no engine drew"),
        ({"token_ids_T": (1, VOCAB)}, f"token_ids_T holds {VOCAB}, outside the vocabulary"),
    ],
)
def test_what_cannot_go_on_is_refused_with_all_that_came_with_it(change, message):
    engine = make_engine("llama")
    first, second = make_requests(prompts=2, samples=1, max_tokens=5)
    engine.submit([first, second])
    for _ in range(2):
        engine.step()
    good, bad = engine.abort([first.sample_id, second.sample_id])
    if "request" in change:
        sampling = replace(bad.request.sampling, **change["request"])
        change = {"request": replace(bad.request, sampling=sampling)}
    with pytest.raises(UsageError, match=message):
        engine.resume([good, replace(bad, **change)])
    assert engine.num_in_flight == 0
    with pytest.raises(UsageError, match="in flight already"):
        engine.resume([good, good])
    engine.resume([good])
    with pytest.raises(UsageError, match="in flight already"):
        engine.resume([good])
    assert engine.num_in_flight == 1
