"""Laws of `engine.transport`: it says how weights travel, and nothing else changes by it."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from shardloop import hf
from shardloop.config import (
    EngineConfig,
    EvalConfig,
    OptimConfig,
    TrainConfig,
    TrainerConfig,
    TransportName,
    WorkersConfig,
)
from shardloop.controller.describe import describe
from shardloop.controller.run import train
from shardloop.controller.rundir import RunFolder
from shardloop.controller.setup import resolve
from shardloop.errors import Interrupted, UsageError
from shardloop.metrics import read_jsonl
from shardloop.reshard.cost import cost
from shardloop.tiny import build_tiny
from tests.controller.pages import unexplained
from tests.controller.test_run import SMALL, TIMES

REPLICAS = "engine:replicas=2,tp=1"
CONFIG = replace(
    SMALL,
    steps=3,
    sft=replace(SMALL.sft, steps=3),
    optim=OptimConfig(lr=1e-5, warmup_steps=0),
    eval=EvalConfig(prompts=8),
    trainer=TrainerConfig(layout="fsdp=2"),
    engine=EngineConfig(layout=REPLICAS, dtype="bfloat16"),
)
"""Replicas, and weights converted on their way: the relay needs the ones, a delta the others."""
OTHERS = [name for name in get_args(TransportName) if name != "p2p"]


def _with(config: TrainConfig, transport: Any, **engine: Any) -> TrainConfig:
    return replace(config, engine=replace(config.engine, transport=transport, **engine))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run with messages that was stopped after its first step."""
    folder = RunFolder(tmp_path_factory.mktemp("stopped") / "run")
    with pytest.raises(Interrupted, match="stopped after step 1 of 3"):
        list(train(CONFIG, folder, stop_requested=lambda: len(read_jsonl(folder.metrics)) >= 1))
    return folder


def _resumed(
    stopped: RunFolder, tmp_path: Path, transport: str, *, sleep: str = "never"
) -> RunFolder:
    """The rest of the run; where the engine sleeps, on the trainer's ranks."""
    folder = RunFolder(tmp_path / "run")
    shutil.copytree(stopped.root, folder.root)
    config = _with(folder.read_config(), transport, sleep=sleep)
    workers = replace(config.workers, colocate=sleep != "never")
    list(train(replace(config, workers=workers), folder, resume=True))
    return folder


@pytest.fixture(scope="module")
def by_messages(stopped: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return _resumed(stopped, tmp_path_factory.mktemp("messages"), "p2p")


@pytest.mark.parametrize("transport", OTHERS)
def test_a_run_goes_on_alike_whichever_way_its_weights_travel(
    stopped: RunFolder, by_messages: RunFolder, tmp_path: Path, transport: str
) -> None:
    folder = _resumed(stopped, tmp_path, transport)
    assert folder.read_config().engine.transport == transport
    ours, theirs = (read_jsonl(f.metrics) for f in (folder, by_messages))
    _check_same(folder, by_messages)
    assert unexplained(folder) == set()
    _check_wire([step["wire_bytes"] for step in ours], theirs[-1]["wire_bytes"], transport)
    densities = [step["wire_density"] for step in ours if "wire_density" in step]
    if transport == "delta":
        assert densities[0] == 1.0 and 0.0 < densities[1] < 0.5
    else:
        assert densities == []


@pytest.mark.parametrize("transport", ["shm", "delta", "gather"])
def test_weights_reach_an_engine_that_gave_up_its_own_whichever_way_they_travel(
    stopped: RunFolder, by_messages: RunFolder, tmp_path: Path, transport: str
) -> None:
    folder = _resumed(stopped, tmp_path, transport, sleep="weights")
    _check_same(folder, by_messages)
    densities = [step.get("wire_density") for step in read_jsonl(folder.metrics)]
    assert transport != "delta" or densities[1:] == [1.0, 1.0], "what was given up is sent whole"


def _check_same(folder: RunFolder, other: RunFolder) -> None:
    """The metrics of all steps, clocks and the wire aside, and the exported weights."""
    ours, theirs = (read_jsonl(f.metrics) for f in (folder, other))
    assert [step["step"] for step in ours] == [1, 2, 3]
    for one, two in zip(ours, theirs, strict=True):
        for name in {*one, *two} - {*TIMES, "wire_density"}:
            assert one[name] == two[name], name
    weights = [hf.load_weights(f.export) for f in (folder, other)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[1])


def _check_wire(bytes_by_step: list[int], by_messages: int, transport: str) -> None:
    """Step 1 went by messages."""
    first, *later = bytes_by_step
    assert first == by_messages
    if transport in ("shm", "relay"):
        assert later == [by_messages] * 2
    if transport == "gather":
        assert min(later) > by_messages
    if transport == "delta":
        assert later[1] < by_messages < later[0] < 1.1 * by_messages


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.mark.parametrize(
    ("layout", "colocate"),
    [("engine:tp=2", False), ("engine:replicas=1,tp=2", False), (REPLICAS, True)],
)
def test_a_relay_without_replicas_on_ranks_of_their_own_is_refused(
    tiny: Path, layout: str, colocate: bool
) -> None:
    config = replace(
        _with(CONFIG, "relay", layout=layout), workers=WorkersConfig(colocate=colocate)
    )
    message = (
        f"engine.transport=relay with engine.layout={layout} and workers.colocate="
        f"{'true' if colocate else 'false'}; .*choose engine:replicas=R,tp=N on ranks of its own"
    )
    with pytest.raises(UsageError, match=message):
        resolve(config, tiny)
    resolve(_with(CONFIG, "relay"), tiny)


@pytest.mark.parametrize("transport", get_args(TransportName))
def test_the_description_says_how_weights_travel_and_how_many_bytes(
    tiny: Path, transport: str
) -> None:
    setup = resolve(_with(CONFIG, transport), tiny)
    text = describe(setup, root=tiny)
    assert f"each sync   {transport}: " in text and "least possible" in text
    whole = f"{cost(setup.proof.plan, itemsize=2).wire_bytes / 1e3:.3g} kB on the wire"
    assert (whole in text) == (transport != "gather"), "whole tensors need more than the plan"
