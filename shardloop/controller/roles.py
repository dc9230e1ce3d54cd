"""What each rank of a run builds: trainer, engine, weight sync. Floor 4.

These functions run on the workers: `workers.spawn("trainer", build_trainer, ...)`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardloop import hf
from shardloop.config import EngineConfig, OptimConfig, TrainConfig, TrainerConfig
from shardloop.controller.placement import replica_role
from shardloop.engines.base import Engine
from shardloop.engines.local import LocalEngine
from shardloop.families import canonical_model
from shardloop.invariant import Kernels
from shardloop.layout import make_layout, parse_layout
from shardloop.parallel.context import RankContext
from shardloop.parallel.tp import ProcessGroupTP
from shardloop.reshard.verify import Proof
from shardloop.trainer import Trainer
from shardloop.transport.relay import Relay, plan_relay
from shardloop.weight_sync import WeightSync


def build_trainer(
    context: RankContext,
    trainer: TrainerConfig,
    optim: OptimConfig,
    model_dir: Path,
    *,
    reference: bool,
    zero_gap: bool = False,
) -> Trainer:
    """A trainer of the policy in `model_dir`; with `reference` it keeps a frozen copy of it.

    With `zero_gap` it computes by the kernels of an engine that is built so too.
    """
    return Trainer(
        context,
        model_dir=model_dir,
        config=trainer,
        optim=optim,
        reference=reference,
        kernels=_kernels(zero_gap=zero_gap),
    )


def _kernels(*, zero_gap: bool) -> Kernels:
    return "invariant" if zero_gap else "fast"


def build_engine(
    context: RankContext,
    config: EngineConfig,
    hf_config: Mapping[str, Any],
    *,
    weights_from: Path | None = None,
    tokenizer_from: Path | None = None,
    zero_gap: bool = False,
) -> Engine:
    """An engine, of one replica where it has several.

    Args:
        weights_from: model folder whose weights it has as version 0. Without one it has none, and
            refuses to generate until the first sync.
        tokenizer_from: model folder whose tokenizer finds stop texts; None where there are none.
        zero_gap: compute by the kernels of a trainer that is built so too.
    """
    layout = make_layout(canonical_model(hf_config), config.layout)
    place = context.role_rank("engine")
    engine = LocalEngine(
        hf_config,
        layout=layout,
        rank=place,
        comm=ProcessGroupTP(context.group(_tensor_parallel_role(context, place, config.layout))),
        dtype=getattr(torch, config.dtype),
        max_slots=config.max_slots,
        device=context.device,
        decode=None if tokenizer_from is None else hf.load_tokenizer(tokenizer_from).decode,
        kernels=_kernels(zero_gap=zero_gap),
    )
    if weights_from is not None:
        engine.load_from_state_dict(hf.load_weights(weights_from))
    return engine


def _tensor_parallel_role(context: RankContext, place: int, spec: str) -> str:
    """The role whose ranks hold one copy of the engine's model together."""
    axes = parse_layout(spec)
    return replica_role(place // axes.size("tp")) if axes.size("replicas") > 1 else "engine"


def build_sync(context: RankContext, config: TrainConfig, proof: Proof) -> WeightSync:
    """Needs `trainer` and `engine` to be built before, on the ranks of their roles."""
    return WeightSync(
        context.objects.get("trainer"),
        context.objects.get("engine"),
        proof=_relay(proof) if config.engine.transport == "relay" else proof,
        transport=config.engine.transport,
        group=context.group("sync"),
        dtype=getattr(torch, config.engine.dtype),
        timeout_s=context.collective_timeout_s,
    )


def _relay(proof: Proof) -> Relay:
    """The chain through the replicas that the plan sends to one by one."""
    plan = proof.plan
    num_replicas = parse_layout(plan.dst.spec).size("replicas")
    size = len(plan.dst_ranks) // num_replicas
    return plan_relay(
        plan.src,
        make_layout(plan.dst.model, f"engine:tp={size}"),
        src_ranks=plan.src_ranks,
        replica_ranks=[plan.dst_ranks[i * size :][:size] for i in range(num_replicas)],
    )


def release(context: RankContext, key: str) -> None:
    """Drops what was built under `key`, and its memory with it."""
    built = context.objects.pop(key)
    if isinstance(built, WeightSync):
        built.close()
