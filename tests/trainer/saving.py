"""What is saved: trainers, and single values. Called by the tests of checkpoints."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.checkpoint import load_checkpoint, save_checkpoint
from shardloop.config import OptimConfig, TrainerConfig
from shardloop.errors import CheckpointError
from shardloop.parallel.context import RankContext
from shardloop.parallel.fsdp import full_tensor
from shardloop.trainer import Trainer
from tests.trainer.batches import make_random_batch


def make_trainer(
    context: RankContext, folder: Path, *, dtype: str = "float64", reference: bool = False
) -> Trainer:
    config = TrainerConfig(layout=f"fsdp={context.world_size}", dtype=dtype, row_tokens=16)
    return Trainer(
        context,
        model_dir=folder,
        config=config,
        optim=OptimConfig(weight_decay=0.1),
        reference=reference,
        role="all",
    )


def train(trainer: Trainer, seeds: range) -> None:
    for seed in seeds:
        trainer.forward_backward(make_random_batch(seed=seed), "sft")
        trainer.step(0.01)
        trainer.advance_version()


def whole_state(trainer: Trainer) -> dict[str, Tensor]:
    return {key: full_tensor(value).clone() for key, value in trainer._checkpoint_state().items()}


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Writing more fails with OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def message(action: Any) -> str | None:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return None


def save_value(path: Path, value: float, group: dist.ProcessGroup) -> None:
    state = {"w": torch.full((3,), float(value))}
    save_checkpoint(path, state, version=int(value), extra={"step": value}, group=group)


def loaded_value(path: Path | None, group: dist.ProcessGroup) -> float:
    assert path is not None
    state = {"w": torch.zeros(3)}
    restored = load_checkpoint(path, state, group=group)
    assert restored.version == restored.extra["step"] == float(state["w"][0])
    return float(state["w"][0])


def shard(path: Path) -> Path:
    return next(path.glob("*.distcp"))
