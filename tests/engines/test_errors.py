"""What an error leaves behind: every request with its tokens; and that it comes out itself."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from shardloop import hf
from shardloop.errors import ModelError, PolicyDiverged, UsageError
from shardloop.model import SingleProcess
from shardloop.types import Completion, Request, SampleId, Sampling
from tests.engines.models import (
    empty_engine,
    make_engine,
    make_requests,
    model_folder,
    weights_of,
)

LOST = "Connection closed by peer"


class FailingComm(SingleProcess):
    """Its `fail_at`-th collective from when that was set raises, once."""

    fail_at = 0

    def _count(self) -> None:
        self.fail_at -= 1
        if self.fail_at == 0:
            raise RuntimeError(LOST)

    def all_reduce(self, x):
        self._count()
        return x

    def all_gather_last_dim(self, x):
        self._count()
        return x


def requests_of(uid: str, *, max_tokens: int) -> list[Request]:
    return [
        Request(
            prompt_ids=(5, 6, 7),
            sampling=Sampling(max_tokens=max_tokens),
            sample_id=SampleId(prompt_uid=uid, index=index),
            seed=0,
        )
        for index in range(2)
    ]


def check_in_flight(engine, requests) -> None:
    """Exactly `requests` are in flight, and their prompts are kept for exactly them."""
    assert engine.num_in_flight == len(requests)
    assert engine._prefixes._users == Counter(request.prompt_ids for request in requests)


def check_same(ours: list[Completion], theirs: list[Completion]) -> None:
    assert len(ours) == len(theirs)
    expected = {completion.request.sample_id: completion for completion in theirs}
    for completion in ours:
        other = expected.pop(completion.request.sample_id)
        assert completion.token_ids_T == other.token_ids_T
        assert completion.version_T == other.version_T
        assert completion.full_T == pytest.approx(other.full_T, abs=1e-12, rel=0)


def run_through(fail_at: int, *, update: bool) -> tuple[list[Completion], int]:
    """Steps to the end, though one collective fails; what came out, and how many steps failed."""
    comm = FailingComm()
    engine = make_engine("llama", comm=comm, max_slots=3)
    waiting = make_requests(prompts=3, samples=2, max_tokens=3)
    engine.submit(waiting)
    finished, num_failed = engine.step(), 0
    if update:
        engine.load_from_state_dict(weights_of("llama", 1), version=1)
    comm.fail_at = fail_at
    while engine.num_in_flight:
        try:
            finished += engine.step()
        except RuntimeError as error:
            assert str(error) == LOST
            num_failed += 1
        ended = {completion.request.sample_id for completion in finished}
        check_in_flight(engine, [r for r in waiting if r.sample_id not in ended])
    return finished, num_failed


@pytest.mark.parametrize("update", [False, True])
def test_a_step_that_fails_at_any_collective_can_be_made_again(update):
    expected, fail_at = run_through(0, update=update)[0], 0
    num_failed = 1
    while num_failed:
        fail_at += 1
        finished, num_failed = run_through(fail_at, update=update)
        check_same(finished, expected)
    assert fail_at > 20, "prefills and decodes were among the collectives that failed"


@cache
def undisturbed(requests: tuple[Request, ...]) -> list[Completion]:
    return make_engine("llama").generate(requests)


def generate_beside(fail_at: int) -> bool:
    """Whether `generate` failed, with one request done but unclaimed and one still running."""
    comm = FailingComm()
    engine = make_engine("llama", comm=comm, max_slots=3)
    short, long = requests_of("short", max_tokens=1), requests_of("long", max_tokens=9)
    engine.submit([*short, *long])
    engine.generate(make_requests(prompts=1, samples=1, max_tokens=2))
    ours = make_requests(prompts=2, samples=2, max_tokens=3)
    comm.fail_at, failed = fail_at, False
    try:
        engine.generate(ours)
    except RuntimeError as error:
        assert str(error) == LOST
        failed = True
    comm.fail_at = 0
    in_flight = {request.sample_id for request in engine._slots.requests}
    check_in_flight(engine, [request for request in long if request.sample_id in in_flight])
    others = engine.step()
    while engine.num_in_flight:
        others += engine.step()
    check_same(others + engine.generate(ours), undisturbed((*short, *long, *ours)))
    return failed


def test_a_generate_that_fails_at_any_collective_leaves_the_others_whole():
    fail_at = 1
    while generate_beside(fail_at):
        fail_at += 1
    assert fail_at > 20, "prefills and decodes were among the collectives that failed"


def test_a_draw_that_fails_can_be_made_again(monkeypatch):
    requests = make_requests(prompts=2, samples=2, max_tokens=3)
    expected = make_engine("llama").generate(requests)
    engine = make_engine("llama")
    engine.submit(requests)

    def fail(*_, **__):
        raise MemoryError("no room to draw")

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr("shardloop.engines.local.draw", fail)
            with pytest.raises(MemoryError, match="no room to draw"):
                engine.step()
        check_in_flight(engine, requests)
        finished = engine.step()
    check_same(finished, expected)


@pytest.mark.parametrize("fail_at", range(1, 7))
def test_a_submit_without_memory_takes_nothing(monkeypatch, fail_at):
    first, second = requests_of("a", max_tokens=3), requests_of("b", max_tokens=40)
    engine = make_engine("llama")
    engine.submit(first)
    calls = iter(range(1, 100))

    def pad(tensor, sizes):
        if next(calls) == fail_at:
            raise MemoryError("no room to grow")
        return torch.constant_pad_nd(tensor, sizes)

    with monkeypatch.context() as patch:
        patch.setattr("shardloop.engines.slots.F.pad", pad)
        with pytest.raises(MemoryError, match="no room to grow"):
            engine.submit(second)
    check_in_flight(engine, first)
    check_same(engine.generate(second), undisturbed(tuple(second)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": [1, 2]}, "prompt_ids is a list; pass a tuple of Python integers"),
        ({"prompt_ids": (1.5, 2)}, "prompt_ids holds 1.5; pass a tuple of Python integers"),
        ({"prompt_ids": (True, 2)}, "prompt_ids holds True"),
    ],
)
def test_ids_that_are_no_tuple_of_integers_are_refused(change, message):
    good, other = requests_of("a", max_tokens=2)
    bad = Request(sampling=other.sampling, sample_id=other.sample_id, seed=0, **change)
    engine = make_engine("llama")
    with pytest.raises(UsageError, match=message):
        engine.submit([good, bad])
    check_in_flight(engine, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": np.int64(3)}, r"seed=np\.int64\(3\); pass a Python integer"),
        ({"seed": None}, "seed=None"),
        ({"sample_id": SampleId(prompt_uid="p", index=np.int64(1))}, r"index=np\.int64\(1\)"),
        ({"sample_id": SampleId(prompt_uid="p", index=0, turn=1.0)}, r"turn=1\.0"),
        ({"sample_id": SampleId(prompt_uid=b"p", index=0)}, "prompt_uid=b'p'; pass a text"),
    ],
)
def test_an_identity_that_noise_cannot_be_made_of_is_refused_and_stops_nobody_else(change, message):
    good, other = requests_of("a", max_tokens=2)
    engine = make_engine("llama")
    with pytest.raises(UsageError, match=message):
        engine.submit([good, replace(other, **change)])
    check_in_flight(engine, [])
    check_same(engine.generate([good]), undisturbed((good,)))


@pytest.mark.parametrize("value", [torch.tensor(3.0), torch.ones(1), torch.ones(1, 32)])
def test_a_written_value_has_the_shape_of_its_view(value):
    engine = make_engine("llama")
    engine.begin_update(1)
    weight = engine.tensors()["model.norm.weight"]
    before = weight.clone()
    with pytest.raises(UsageError, match=r"into a view of shape \(32,\)"):
        engine.write([(weight, value)])
    assert torch.equal(weight, before)


def test_weights_that_diverged_are_an_error_of_the_run_and_named_in_short():
    engine = make_engine("llama")
    engine.begin_update(1)
    for tensor in engine.tensors().values():
        tensor.fill_(float("inf"))
    with pytest.raises(PolicyDiverged, match="lower the learning rate") as caught:
        engine.commit_update()
    assert caught.value.exit_code == 5
    num_others = len(engine.tensors()) - 3
    assert f" and {num_others} more" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_state_dict_that_is_not_finite_is_an_error_of_the_model():
    engine = empty_engine(hf.load_config(model_folder("llama")))
    weights = weights_of("llama")
    broken = weights["model.norm.weight"].clone()
    broken[3] = float("nan")
    with pytest.raises(ModelError, match=r"not finite: model\.norm\.weight; the state dict"):
        engine.load_from_state_dict(weights | {"model.norm.weight": broken})
    engine.load_from_state_dict(weights)
    assert engine.version == 0
