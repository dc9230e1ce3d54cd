"""Proved plans from whole Hugging Face weights to any layout, carried out on simulated ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardloop.families import canonical_model
from shardloop.layout import make_layout
from shardloop.reshard.inprocess import execute_inprocess
from shardloop.reshard.plan import Plan, plan_reshard
from shardloop.reshard.verify import verify


def plan_to(spec: str, config: Mapping[str, Any]) -> Plan:
    """From one rank that has the whole model."""
    model = canonical_model(config)
    return plan_reshard(make_layout(model, "fsdp=1"), make_layout(model, spec))


def random_weights(config: Mapping[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = canonical_model(config).tensor_shapes()
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def carried_out(plan: Plan, full: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Local tensors of every destination rank; padding is 0."""
    local = {
        g: {name: torch.zeros(shape) for name, shape in plan.dst.local_shapes(r).items()}
        for r, g in enumerate(plan.dst_ranks)
    }
    execute_inprocess(verify(plan), {0: full}, local)
    return [local[g] for g in plan.dst_ranks]
