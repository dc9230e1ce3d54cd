"""From a model folder to a policy cut over the trainer's mesh. Called by the trainer. Floor 3.

whole model on each rank ──tp──▶ cut by meaning ──▶ layers recomputed ──fsdp──▶ cut on dim 0
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardloop import hf
from shardloop.config import TrainerConfig
from shardloop.errors import UsageError
from shardloop.families import canonical_model
from shardloop.invariant import InvariantPolicy, Kernels
from shardloop.model.config import DecoderConfig
from shardloop.parallel.activation import recompute_in_backward
from shardloop.parallel.fsdp import shard_policy
from shardloop.parallel.mesh import axis_names
from shardloop.parallel.tp_plan import cut_by_tensor_parallel
from shardloop.policy import Policy


def build_policy(
    model_dir: Path,
    config: TrainerConfig,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    kernels: Kernels = "fast",
) -> Policy:
    """Collective over `mesh`: the folder's model in eval mode, every parameter a DTensor.

    Raises:
        ModelError: the folder is no usable model.
        LayoutError: the axis tp of `mesh` does not fit the model.
        UsageError: as `check_config`.
    """
    has_tp = "tp" in axis_names(mesh)
    check_config(config, has_tp=has_tp)
    master_dtype = getattr(torch, config.dtype)
    compute_dtype = getattr(torch, config.compute_dtype or config.dtype)
    causal_lm = hf.load_model(model_dir, dtype=master_dtype).to(device)
    policy = Policy(causal_lm)
    if kernels == "invariant":
        decoder_config = DecoderConfig.from_hf(hf.load_config(model_dir))
        tp_size = mesh["tp"].size() if has_tp else 1
        policy = InvariantPolicy(causal_lm, decoder_config, tp_size=tp_size, dtype=compute_dtype)
    if has_tp:
        model = canonical_model(hf.load_config(model_dir))
        sequence_parallel = config.sequence_parallel
        cut_by_tensor_parallel(policy, model, mesh["tp"], sequence_parallel=sequence_parallel)
    if config.activation_checkpointing:
        layers: Iterable[nn.Module] = policy.model.layers  # type: ignore[assignment]
        recompute_in_backward(layers)
    is_mixed = compute_dtype != master_dtype
    return shard_policy(
        policy,
        mesh,
        compute_dtype=compute_dtype if is_mixed else None,
        reduce_dtype=master_dtype if is_mixed else None,
    ).eval()


def check_config(config: TrainerConfig, *, has_tp: bool) -> None:
    """
    Raises:
        UsageError: sequence parallelism without tp.
    """
    if config.sequence_parallel and not has_tp:
        raise UsageError(
            f"trainer.sequence-parallel with trainer.layout={config.layout!r}: it cuts activations "
            "over the ranks of tp; add tp=2 or more to the layout, or leave it out"
        )
