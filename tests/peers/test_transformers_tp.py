"""Our training layouts under tensor and expert parallelism against those of transformers.

transformers applies its own plan to a model, on every rank in turn; groups that move nothing are
enough for that. What it leaves on a rank must be what a proved plan puts there, bit by bit.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from shardloop.families import canonical_model
from tests.families.configs import moe_config
from tests.layout.reference import tiny_config
from tests.peers.groups import idle_groups
from tests.peers.inprocess import carried_out, plan_to

pytestmark = [pytest.mark.optional, pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 24, "num_attention_heads": 8, "num_key_value_heads": 4}
DENSE: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama", attention_bias=True, mlp_bias=True, **SIZES),
    "qwen2": tiny_config("qwen2", vocab_size=11, **SIZES),
    "qwen3": tiny_config("qwen3", tie_word_embeddings=True, **SIZES),
}
ROUTED: dict[str, dict[str, Any]] = {
    "qwen3_moe": moe_config("qwen3_moe", **{**SIZES, "moe_intermediate_size": 8}),
    "mixtral": moe_config("mixtral", **{**SIZES, "num_local_experts": 4}),
    "deepseek_v3": moe_config("deepseek_v3", moe_intermediate_size=8, hidden_size=24),
}
CONFIGS = {**DENSE, **ROUTED}
LAYOUTS = {"tp=2": CONFIGS, "tp=4": CONFIGS, "tp=2,ep=2": ROUTED, "ep=4": ROUTED}
cases = pytest.mark.parametrize(
    ("spec", "name"), [(spec, name) for spec, configs in LAYOUTS.items() for name in configs]
)
UNCUT_THERE = ("q_b_proj", "kv_b_proj", "o_proj")
"""Of latent attention, which transformers leaves whole; here its heads are shared."""


@cases
def test_every_rank_holds_what_transformers_leaves_there(spec: str, name: str) -> None:
    config = CONFIGS[name]
    full = dict(_canonical(_model(config).state_dict(), config))
    assert {n: tuple(t.shape) for n, t in full.items()} == canonical_model(config).tensor_shapes()
    plan = plan_to(spec, config)
    for rank, ours in enumerate(carried_out(plan, full)):
        theirs = dict(_canonical(_local_weights(config, spec, rank), config, spec, rank))
        assert theirs.keys() == ours.keys()
        for hf_name, weight in theirs.items():
            if name == "deepseek_v3" and hf_name.split(".")[-2] in UNCUT_THERE:
                np.testing.assert_array_equal(weight, full[hf_name])
            else:
                np.testing.assert_array_equal(ours[hf_name], weight, err_msg=f"{rank} {hf_name}")


def _model(config: Mapping[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    for tensor in model.state_dict().values():
        tensor.normal_()  # norms and biases too
    return model


def _sizes(spec: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in (item.split("=") for item in spec.split(","))}


def _local_weights(config: Mapping[str, Any], spec: str, rank: int) -> dict[str, Tensor]:
    """What transformers leaves of the model on a rank."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    tp, ep = (_sizes(spec).get(axis, 1) for axis in ("tp", "ep"))
    model: Any = _model(config)
    with idle_groups(rank, max(tp, ep)):
        mesh = init_device_mesh("cpu", (max(tp, ep),))
        wanted = DistributedConfig(tp_size=tp, ep_size=ep, fsdp_size=max(tp, ep) // tp)
        tp_plan, ep_plan, _ = model._resolve_parallel_plans(wanted)
        if config["tie_word_embeddings"]:  # then the head's weight is the embedding's
            tp_plan = {key: style for key, style in tp_plan.items() if "lm_head" not in key}
        apply_tensor_parallelism(model, mesh, tp_plan)
        apply_expert_parallelism(model, mesh, mesh, ep_plan)
        return {
            name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for name, tensor in model.state_dict().items()
        }


def _canonical(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], spec: str = "tp=1", rank: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Names of checkpoints: transformers stacks experts, and calls Mixtral's as it does all."""
    for name, tensor in tensors.items():
        if config["model_type"] == "mixtral":
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        head, _, kind = name.partition(".experts.")
        if not kind:
            yield name, tensor
            continue
        first = len(tensor) * rank if "ep" in _sizes(spec) else 0
        for expert, weight in enumerate(tensor, start=first):
            for part, rows in _parts(kind, weight, config["model_type"]):
                yield f"{head}.experts.{expert}.{part}.weight", rows


def _parts(kind: str, weight: Tensor, model_type: str) -> Iterator[tuple[str, Tensor]]:
    gate, up, down = (
        ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    if kind == "down_proj":
        yield down, weight
    else:
        assert kind == "gate_up_proj"
        yield from zip((gate, up), weight.chunk(2), strict=True)
