"""What each rank of a run builds: trainer, engine, weight sync. Floor 4.

These functions run on the workers: `workers.spawn("trainer", build_trainer, ...)`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardloop.config import EngineConfig, TrainConfig
from shardloop.controller.placement import Placement
from shardloop.engines.local import LocalEngine
from shardloop.families import canonical_model
from shardloop.layout import make_layout
from shardloop.parallel.tp import ProcessGroupTP
from shardloop.parallel.worker import RankContext
from shardloop.trainer import Trainer
from shardloop.weight_sync import WeightSync


def build_trainer(context: RankContext, config: TrainConfig, model_dir: Path) -> Trainer:
    return Trainer(
        context,
        model_dir=model_dir,
        config=config.trainer,
        optim=config.optim,
        reference=config.grpo.kl_coef > 0.0,
    )


def build_engine(
    context: RankContext, config: EngineConfig, hf_config: Mapping[str, Any]
) -> LocalEngine:
    """An engine without weights: it refuses to generate until the first sync."""
    group, rank = context.group("engine"), context.role_rank("engine")
    assert group is not None and rank is not None, f"rank {context.rank} is no engine rank"
    return LocalEngine(
        hf_config,
        layout=make_layout(canonical_model(hf_config), config.layout),
        rank=rank,
        comm=ProcessGroupTP(group),
        dtype=getattr(torch, config.dtype),
        max_slots=config.max_slots,
        device=context.device,
    )


def build_sync(
    context: RankContext, config: TrainConfig, hf_config: Mapping[str, Any], placement: Placement
) -> WeightSync:
    """Needs `trainer` and `engine` to be built before, on the ranks of their roles."""
    model = canonical_model(hf_config)
    group = context.group("sync")
    assert group is not None, "every rank takes part in the sync"
    return WeightSync(
        context.objects.get("trainer"),
        context.objects.get("engine"),
        src=make_layout(model, config.trainer.layout),
        dst=make_layout(model, config.engine.layout),
        src_ranks=placement.trainer_ranks,
        dst_ranks=placement.engine_ranks,
        group=group,
        dtype=getattr(torch, config.engine.dtype),
        timeout_s=config.workers.timeout_s,
    )


def release(context: RankContext, key: str) -> None:
    """Drops what was built under `key`, and its memory with it."""
    del context.objects[key]
