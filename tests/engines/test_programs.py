"""Calls in any order: requests end once, tokens are their weights', refusals change nothing."""

import random
from contextlib import suppress
from functools import cache

import pytest

from shardloop.engines.local import LocalEngine
from shardloop.errors import PolicyDiverged, UsageError
from shardloop.types import Completion, Request, SampleId, Sampling
from tests.engines.models import VOCAB, make_engine, weights_of
from tests.engines.test_local import run_out, same
from tests.engines.test_stops import letters

NUM_WEIGHTS = 3
"""Version v has the weights of seed v % NUM_WEIGHTS."""
PROMPTS = [(5,), (1, 2, 3), (4, 5, 6, 7, 8, 9, 10), (1, 2, 3, 4)]


@cache
def fresh_engine(seed: int) -> LocalEngine:
    return make_engine("qwen3", seed=seed, decode=letters)


def random_request(rng: random.Random, index: int) -> Request:
    return Request(
        prompt_ids=rng.choice(PROMPTS),
        sampling=Sampling(
            max_tokens=rng.randint(1, 9),
            temperature=rng.choice([0.0, 0.7, 1.0]),
            min_p=rng.choice([0.0, 0.3]),
            top_p=rng.choice([0.8, 1.0]),
            stop_token_ids=rng.choice([(), (3, 7)]),
            stop=rng.choice([(), ("c",), ("ab", "ba", "abd")]),
        ),
        sample_id=SampleId(prompt_uid="p", index=index),
        seed=3,
    )


class Program:
    """Random calls on one engine, and what must be true of them by the protocol alone."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine = make_engine("qwen3", max_slots=self.rng.choice([1, 3, 8]), decode=self.decode)
        self.version, self.opened = 0, None
        self.asleep = False
        self.whole = self.written = True
        """Whether every weight is there; whether it will be, once the update is committed."""
        self.fails = False
        """Whether the next text cannot be decoded."""
        self.asked: list[Request] = []
        self.in_flight: set[SampleId] = set()
        self.aborted: list[Completion] = []
        self.ended: list[Completion] = []

    def decode(self, ids) -> str:
        if self.fails:
            self.fails = False
            raise MemoryError("no room to decode")
        return letters(ids)

    def refused(self, call, *args) -> None:
        """The call raises, and nothing is different."""

        def state():
            tensors = self.engine.tensors().values()
            sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
            return self.engine.version, self.engine.num_in_flight, sizes

        before = state()
        with pytest.raises(UsageError):
            call(*args)
        assert state() == before

    def submit(self) -> None:
        first = len(self.asked)
        requests = [random_request(self.rng, first + i) for i in range(self.rng.randint(1, 4))]
        if running := self.running():
            taken = next(r for r in self.asked if r.sample_id in running)
            self.refused(self.engine.submit, [*requests, taken])
        self.engine.submit(requests)
        self.asked += requests
        self.in_flight |= {request.sample_id for request in requests}

    def take(self, completions: list[Completion]) -> None:
        for completion in completions:
            self.in_flight.remove(completion.request.sample_id)
        self.ended += completions

    def is_ready(self) -> bool:
        return self.opened is None and not self.asleep and self.whole

    def step(self) -> None:
        if not self.is_ready():
            self.refused(self.engine.step)
            return
        self.fails = self.rng.random() < 0.15
        with suppress(MemoryError):
            self.take(self.engine.step())
        self.fails = False

    def generate(self) -> None:
        request = random_request(self.rng, len(self.asked))
        if not self.is_ready():
            self.refused(self.engine.generate, [request])
            return
        self.asked.append(request)
        self.ended += self.engine.generate([request])

    def running(self) -> list[SampleId]:
        """In flight, without those that ended during a `generate` and come out of the next step."""
        held = {completion.request.sample_id for completion in self.engine._unclaimed}
        return sorted(self.in_flight - held, key=lambda sample: sample.index)

    def abort(self) -> None:
        ids = self.rng.sample(self.running(), self.rng.randint(0, len(self.running())))
        self.refused(self.engine.abort, [*ids, SampleId(prompt_uid="nobody", index=0)])
        gone = self.engine.abort([*ids, *ids])
        assert [completion.request.sample_id for completion in gone] == ids
        self.in_flight -= set(ids)
        self.aborted += gone

    def resume(self) -> None:
        self.rng.shuffle(self.aborted)
        cut = self.rng.randint(0, len(self.aborted))
        again, self.aborted = self.aborted[:cut], self.aborted[cut:]
        if again:
            self.refused(self.engine.resume, [*again, again[0]])
        if self.ended:
            self.refused(self.engine.resume, [*again, self.ended[-1]])
        self.engine.resume(again)
        self.in_flight |= {completion.request.sample_id for completion in again}

    def sleep(self) -> None:
        level = self.rng.choice(["cache", "weights"])
        if self.opened is not None:
            self.refused(self.engine.sleep, level)
            return
        self.engine.sleep(level)
        self.asleep = True
        if level == "weights":
            self.whole = self.written = False
        engine = self.engine
        assert engine._slots.kv_L2SKCE.untyped_storage().nbytes() == len(engine._prefixes) == 0
        if level == "weights":
            assert not any(t.untyped_storage().nbytes() for t in engine.tensors().values())

    def wake(self) -> None:
        self.engine.wake()
        self.asleep = False

    def begin(self) -> None:
        self.refused(self.engine.begin_update, -1)
        self.opened = self.version + self.rng.randint(1, 2)
        self.engine.begin_update(self.opened)

    def write(self) -> None:
        if self.opened is None:
            self.refused(self.engine.write, [])
            return
        donor = fresh_engine(self.opened % NUM_WEIGHTS).tensors()
        self.engine.write((view, donor[name]) for name, view in self.engine.tensors().items())
        self.written = True

    def commit(self) -> None:
        if self.opened is None:
            self.refused(self.engine.commit_update)
        elif not self.written:
            with pytest.raises(PolicyDiverged, match="not written"):
                self.engine.commit_update()
        else:
            self.write()
            self.engine.commit_update()
            self.version, self.opened, self.whole = self.opened, None, True

    def finish(self) -> None:
        self.begin()
        self.write()
        self.commit()
        self.wake()
        self.engine.resume(self.aborted)
        self.ended += run_out(self.engine) + self.engine.step()


def check_tokens(completion: Completion) -> None:
    """Each run of one version goes on as a fresh engine of these weights would."""
    versions = completion.version_T
    assert list(versions) == sorted(versions)
    start = 0
    while start < len(versions):
        stop = start + versions[start:].count(versions[start])
        began = cut(completion, start)
        engine = fresh_engine(versions[start] % NUM_WEIGHTS)
        engine.resume([began])
        (whole,) = run_out(engine)
        if stop == len(versions):
            same([completion], [whole])
        else:
            reason = completion.finish_reason
            assert cut(completion, stop).token_ids_T == cut(whole, stop).token_ids_T, reason
            assert completion.full_T[:stop] == pytest.approx(whole.full_T[:stop], abs=1e-12)
        start = stop


def cut(completion: Completion, count: int) -> Completion:
    """As an abort after `count` tokens would have left it."""
    return Completion(
        request=completion.request,
        token_ids_T=completion.token_ids_T[:count],
        behave_T=completion.behave_T[:count],
        full_T=completion.full_T[:count],
        version_T=completion.version_T[:count],
        loss_mask_T=completion.loss_mask_T[:count],
        finish_reason="aborted",
    )


def run_program(seed: int, num_calls: int) -> None:
    program = Program(seed)
    calls = ["submit", "abort", "resume", "sleep", "wake", "begin", "write", "generate"]
    calls += ["step"] * 6 + ["commit"] * 3 + ["wake"] * 2
    for _ in range(num_calls):
        getattr(program, program.rng.choice(calls))()
    program.finish()
    ended = [completion.request.sample_id for completion in program.ended]
    assert sorted(s.index for s in ended) == list(range(len(program.asked)))
    assert program.engine._prefixes._users.total() == 0
    for completion in program.ended:
        check_tokens(completion)


@pytest.mark.parametrize("program", range(4))
def test_calls_in_any_order_end_each_request_once_with_its_weights_own_tokens(program):
    assert VOCAB > 26
    for seed in range(NUM_WEIGHTS):
        weights_of("qwen3", seed)
    run_program(program, num_calls=60)
