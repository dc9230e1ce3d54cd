"""What each rank of a run builds: trainer, engine, weight sync. Floor 4.

These functions run on the workers: `workers.spawn("trainer", build_trainer, ...)`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardloop import hf
from shardloop.config import EngineConfig, OptimConfig, TrainConfig, TrainerConfig
from shardloop.engines.base import Engine
from shardloop.engines.local import LocalEngine
from shardloop.families import canonical_model
from shardloop.layout import make_layout
from shardloop.parallel.context import RankContext
from shardloop.parallel.tp import ProcessGroupTP
from shardloop.reshard.verify import Proof
from shardloop.trainer import Trainer
from shardloop.weight_sync import WeightSync


def build_trainer(
    context: RankContext,
    trainer: TrainerConfig,
    optim: OptimConfig,
    model_dir: Path,
    *,
    reference: bool,
) -> Trainer:
    """A trainer of the policy in `model_dir`; with `reference` it keeps a frozen copy of it."""
    return Trainer(context, model_dir=model_dir, config=trainer, optim=optim, reference=reference)


def build_engine(
    context: RankContext,
    config: EngineConfig,
    hf_config: Mapping[str, Any],
    *,
    weights_from: Path | None = None,
) -> Engine:
    """An engine with the weights of a model folder as version 0.

    Without a folder it has none, and refuses to generate until the first sync.
    """
    engine = LocalEngine(
        hf_config,
        layout=make_layout(canonical_model(hf_config), config.layout),
        rank=context.role_rank("engine"),
        comm=ProcessGroupTP(context.group("engine")),
        dtype=getattr(torch, config.dtype),
        max_slots=config.max_slots,
        device=context.device,
    )
    if weights_from is not None:
        engine.load_from_state_dict(hf.load_weights(weights_from))
    return engine


def build_sync(context: RankContext, config: TrainConfig, proof: Proof) -> WeightSync:
    """Needs `trainer` and `engine` to be built before, on the ranks of their roles."""
    return WeightSync(
        context.objects.get("trainer"),
        context.objects.get("engine"),
        proof=proof,
        group=context.group("sync"),
        dtype=getattr(torch, config.engine.dtype),
        timeout_s=context.collective_timeout_s,
    )


def release(context: RankContext, key: str) -> None:
    """Drops what was built under `key`, and its memory with it."""
    del context.objects[key]
