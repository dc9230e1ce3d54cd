"""What befalls one rank of a trainer that is cut both ways befalls all of them, by name."""

import math
import os
from pathlib import Path

import pytest
import torch

from shardloop.config import OptimConfig, TrainerConfig
from shardloop.errors import PolicyDiverged, WorkerDied
from shardloop.parallel.context import RankContext
from shardloop.parallel.fsdp import local_tensor
from shardloop.trainer import Trainer
from tests.harness import run_ranks
from tests.models import make_folder
from tests.trainer.batches import make_random_batch

LAST = 3


def make_trainer(context: RankContext, folder: Path) -> Trainer:
    return Trainer(
        context,
        model_dir=folder,
        config=TrainerConfig(layout="fsdp=2,tp=2", sequence_parallel=True),
        optim=OptimConfig(),
        reference=False,
        role="all",
    )


def spoil_a_copy(context: RankContext, folder: Path, value: float) -> tuple[str, bool]:
    """What `step` says when one rank's gradient of a weight that tp does not cut is `value`, and
    whether the weights are as they were."""
    trainer = make_trainer(context, folder)
    before = {name: shard.clone() for name, shard in trainer.shards().items()}
    trainer.forward_backward(make_random_batch(), "sft")
    gradient = trainer._policy.get_parameter("model.norm.weight").grad
    assert gradient is not None
    if context.rank == LAST:
        local_tensor(gradient)[0] = value
    message = "a step without an error"
    try:
        trainer.step(0.1)
    except PolicyDiverged as error:
        message = str(error)
    after = trainer.shards()
    return message, all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_gradient_that_is_not_finite_in_one_copy_stops_the_update_on_all(tmp_path, value) -> None:
    for message, is_unharmed in run_ranks(spoil_a_copy, 4, make_folder(tmp_path), value):
        assert "the update was not made" in message
        assert is_unharmed


def die_in_backward(context: RankContext, folder: Path) -> None:
    trainer = make_trainer(context, folder)
    if context.rank == LAST:
        layer = trainer._policy.get_submodule("model.layers.0")
        layer.register_full_backward_hook(lambda *_: os._exit(7))
    trainer.forward_backward(make_random_batch(), "sft")


def test_a_rank_that_dies_in_backward_is_named(tmp_path) -> None:
    with pytest.raises(WorkerDied, match=f"rank {LAST}"):
        run_ranks(die_in_backward, 4, make_folder(tmp_path))
