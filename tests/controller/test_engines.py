"""Replicas deal prompts and change nothing else; a sleeping engine needs what it gave up."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shardloop.config import EngineConfig
from shardloop.controller.engines import Engines, deal
from shardloop.controller.loop import grpo_steps
from shardloop.errors import PlanError, UsageError, WorkerError
from shardloop.types import Completion, Request, SampleId, Sampling
from tests.controller.fakes import (
    VOCAB,
    DigitTask,
    InProcessGroup,
    RowEngine,
    RowSync,
    engines_of,
    share_of_a,
)
from tests.controller.test_loop import CONFIG, World
from tests.engines.models import make_engine, make_requests


def random_requests(seed: int) -> list[Request]:
    """Of some prompts with some samples each, in any order, a prompt perhaps twice."""
    rng = random.Random(seed)
    prompts = [tuple(rng.choices(range(9), k=rng.randint(1, 12))) for _ in range(rng.randint(1, 9))]
    requests = [
        Request(
            prompt_ids=ids,
            sampling=Sampling(max_tokens=rng.choice([1, 5, 20])),
            sample_id=SampleId(prompt_uid=str(ids), index=index, attempt=attempt),
            seed=seed,
        )
        for attempt, ids in enumerate(prompts)
        for index in range(rng.randint(1, 5))
    ]
    rng.shuffle(requests)
    return requests


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_shares", [1, 2, 3])
def test_every_request_is_dealt_once_and_a_prompt_to_one_replica(
    seed: int, num_shares: int
) -> None:
    requests = random_requests(seed)
    shares = deal(requests, num_shares=num_shares)
    assert len(shares) == num_shares
    assert sorted(place for share in shares for place in share) == list(range(len(requests)))
    prompts = [{requests[place].prompt_ids for place in share} for share in shares]
    assert sum(map(len, prompts)) == len(set().union(*prompts)), "each is prefilled once"
    loads = [_load(requests, share) for share in shares]
    largest = max(
        _load(requests, [i for i, r in enumerate(requests) if r.prompt_ids == ids])
        for ids in set().union(*prompts)
    )
    assert max(loads) - min(loads) <= largest


def _load(requests: Sequence[Request], share: Sequence[int]) -> int:
    prompts = {requests[place].prompt_ids for place in share}
    new = sum(requests[place].sampling.max_tokens for place in share)
    return sum(map(len, prompts)) + new


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_completions_do_not_depend_on_the_number_of_replicas(num_replicas: int) -> None:
    requests = make_requests(prompts=5, samples=3, max_tokens=6, top_p=0.9)
    random.Random(0).shuffle(requests)
    alone = engines_of(make_engine("qwen3")).generate(requests)
    replicas = [make_engine("qwen3") for _ in range(num_replicas)]
    together = engines_of(*replicas).generate(requests)
    assert [c.request for c in together] == requests
    assert [c.token_ids_T for c in together] == [c.token_ids_T for c in alone]
    for one, other in zip(together, alone, strict=True):
        assert one.full_T == pytest.approx(other.full_T, abs=1e-12)
    assert all(replica.num_drawn_tokens > 0 for replica in replicas)
    prefilled = sum(replica.num_prefilled_tokens for replica in replicas)
    assert prefilled == sum(len(ids) for ids in {r.prompt_ids for r in requests})


def test_a_replica_without_requests_is_not_asked() -> None:
    class Counting(RowEngine):
        calls = 0

        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            self.calls += 1
            return super().generate(requests)

    replicas = [Counting(), Counting()]
    requests = random_requests(0)
    only = [r for r in requests if r.prompt_ids == requests[0].prompt_ids]
    assert len(engines_of(*replicas).generate(only)) == len(only)
    assert sorted(replica.calls for replica in replicas) == [0, 1]
    assert engines_of(*replicas).generate([]) == []


def test_a_replica_that_answers_too_few_is_refused() -> None:
    class Short(RowEngine):
        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            return super().generate(requests)[1:]

    requests = random_requests(3)
    with pytest.raises(WorkerError, match=r"answered \d+ requests by \d+ completions"):
        engines_of(Short(), Short()).generate(requests)


class Sleeper(RowEngine):
    """Remembers what it was told, and refuses what a sleeping engine refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.is_awake = self.has_weights = True

    def sleep(self, level: str) -> None:
        self.told.append(f"sleep {level}")
        self.is_awake = False
        self.has_weights = self.has_weights and level != "weights"

    def wake(self) -> None:
        self.told.append("wake")
        self.is_awake = True

    @property
    def logits_V(self) -> Any:
        return self._logits_V

    @logits_V.setter
    def logits_V(self, logits_V: Any) -> None:  # a sync
        self._logits_V, self.has_weights = logits_V, True

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if not self.is_awake or not self.has_weights:
            raise UsageError("generate on a sleeping engine, or one without weights")
        self.told.append("generate")
        return super().generate(requests)


def _flat(prompt: Any, text: str, *, finished: bool) -> float:
    return 0.5


@pytest.mark.parametrize("level", ["cache", "weights"])
def test_an_engine_sleeps_while_the_trainer_works_and_samples_as_one_that_does_not(
    level: Any,
) -> None:
    awake, asleep = World(), World(Sleeper())
    expected = awake.run()
    config = replace(CONFIG, engine=EngineConfig(sleep=level))
    steps = asleep.run(config)
    assert [step.metrics["reward"] for step in steps] == [s.metrics["reward"] for s in expected]
    told = asleep.engine.told  # type: ignore[attr-defined]
    assert told[:4] == ["generate", f"sleep {level}", "wake", "generate"]
    assert told[-1] == f"sleep {level}"


@pytest.mark.parametrize(("level", "versions"), [("cache", [0]), ("weights", [0] * 6)])
def test_a_step_without_update_syncs_again_only_where_weights_were_given_up(
    level: Any, versions: list[int]
) -> None:
    world = World(Sleeper())
    world.run(replace(CONFIG, engine=EngineConfig(sleep=level)), reward=_flat)
    assert world.sync.versions == versions


def test_between_steps_the_caller_samples_after_taking_the_weights() -> None:
    world = World(Sleeper())
    config = replace(CONFIG, engine=EngineConfig(sleep="weights"))
    world.run(config, stop=1)
    requests = random_requests(1)
    with pytest.raises(UsageError, match="sleeping engine"):
        world.sampler.engine.generate(requests)
    take_weights(world)
    completions = world.sampler.engine.generate(requests)
    assert {v for c in completions for v in c.version_T} == {world.trainer.version} == {1}


def take_weights(world: World) -> int:
    """As an evaluation does."""
    groups: Any = world.trainer_group, InProcessGroup(world.sync)
    return world.sampler.engine.take_weights(*groups)


@pytest.mark.parametrize("level", ["never", "cache", "weights"])
def test_each_version_is_moved_once_though_it_is_evaluated_and_trained(level: Any) -> None:
    """What an evaluation has moved counts for the step that goes on with it."""
    world = World(Sleeper())
    groups: Any = {"trainer": world.trainer_group, "sync": InProcessGroup(world.sync)}
    config = replace(CONFIG, engine=EngineConfig(sleep=level))
    steps = grpo_steps(
        sampler=world.sampler, task=DigitTask(), reward=share_of_a, config=config, **groups
    )
    assert take_weights(world) == take_weights(world) == 0
    bytes_of_steps = []
    for step in steps:
        bytes_of_steps.append(step.metrics["wire_bytes"])
        assert take_weights(world) == take_weights(world) == step.number
        world.sampler.engine.generate(random_requests(1))
    assert world.sync.versions == [0, 1, 2, 3, 4, 5, 6]
    assert bytes_of_steps == [8 * VOCAB] * 6


def test_a_sync_that_failed_is_made_again() -> None:
    world, plain = World(), RowSync.sync

    def broken(version: int) -> Any:
        raise PlanError("refused")

    take_weights(world)
    world.trainer.advance_version()
    world.sync.sync = broken  # type: ignore[method-assign]
    with pytest.raises(PlanError):
        take_weights(world)
    world.trainer.version = 0  # the engine may hold anything by now
    world.sync.sync = lambda version: plain(world.sync, version)  # type: ignore[method-assign]
    assert take_weights(world) == 0
    assert world.sync.versions == [0, 0]


def test_all_replicas_sleep_and_wake() -> None:
    replicas = [Sleeper(), Sleeper()]
    engines: Engines = engines_of(*replicas)
    engines.wake()
    engines.sleep("cache")
    assert [replica.is_awake for replica in replicas] == [False, False]
    engines.wake()
    assert [replica.told for replica in replicas] == [["sleep cache", "wake"]] * 2
