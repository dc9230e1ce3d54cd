"""Our Megatron layouts against Megatron-Core and mbridge themselves, on simulated ranks.

Megatron-Core builds the model of every rank, mbridge fills it from Hugging Face weights; what a
proved plan puts there must be the same, name by name and bit by bit. `make test-all` installs both.
"""

from typing import Any

import numpy as np
import pytest

from shardloop.layout import parse_layout
from tests.families.configs import moe_config
from tests.layout.reference import tiny_config
from tests.peers.inprocess import carried_out, plan_to, random_weights
from tests.peers.mcore import megatron_rank

pytestmark = [pytest.mark.optional, pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "vocab_size": 300}
GROUPS = {**SIZES, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}
DENSE: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama", **GROUPS),
    "qwen2": tiny_config("qwen2", **GROUPS),
    "qwen2-tied": tiny_config("qwen2", tie_word_embeddings=True, **GROUPS),
    "qwen3": tiny_config("qwen3", **GROUPS),
    "qwen3-tied": tiny_config("qwen3", tie_word_embeddings=True, **GROUPS),
}
ROUTED: dict[str, dict[str, Any]] = {
    "qwen3_moe": moe_config("qwen3_moe", **{**GROUPS, "moe_intermediate_size": 8}),
    "mixtral": moe_config("mixtral", **{**GROUPS, "num_local_experts": 4}),
    # mbridge pads no vocabulary here
    "deepseek_v3": moe_config(
        "deepseek_v3", **{**SIZES, "vocab_size": 512, "num_nextn_predict_layers": 0}
    ),
}
CONFIGS = {**DENSE, **ROUTED}
LAYOUTS = {
    "megatron:tp=1": DENSE,
    "megatron:tp=2": CONFIGS,
    "megatron:tp=4": DENSE,
    "megatron:tp=8": DENSE,  # twice as many ranks as kv groups
    "megatron:pp=2,tp=2": CONFIGS,
    "megatron:pp=2,vpp=2": DENSE,
    "megatron:dp=2,tp=2": {"qwen3": DENSE["qwen3"]},
    "megatron:ep=2,tp=2": ROUTED,
    "megatron:ep=4,tp=1": ROUTED,
    "megatron:pp=2,dp=2,tp=2,ep=2,etp=1": ROUTED,
    "megatron:dp=2,tp=1,ep=2,etp=2": ROUTED,
}
cases = pytest.mark.parametrize(
    ("spec", "name"), [(spec, name) for spec, configs in LAYOUTS.items() for name in configs]
)


@cases
def test_every_rank_holds_what_megatron_and_mbridge_put_there(spec: str, name: str) -> None:
    config, axes = CONFIGS[name], dict(parse_layout(spec).axes)
    plan, full = plan_to(spec, config), random_weights(config)
    for rank, ours in enumerate(carried_out(plan, full)):
        with megatron_rank(config, rank, world_size=len(plan.dst_ranks), axes=axes) as theirs:
            shapes, weights = theirs.shapes(), theirs.weights(full)
        assert {n: tuple(t.shape) for n, t in ours.items()} == shapes
        for local_name, weight in weights.items():
            np.testing.assert_array_equal(ours[local_name], weight, err_msg=f"{rank} {local_name}")


@pytest.mark.parametrize(
    "spec", ["megatron:tp=1", "megatron:tp=2", "megatron:tp=4", "megatron:tp=8"]
)
@pytest.mark.parametrize("name", [*DENSE, "qwen3_moe"])
def test_mbridge_makes_the_weights_again_from_what_the_ranks_hold(spec: str, name: str) -> None:
    """A rank may hold no whole kv group: 8 ranks share 4 of them."""
    config, axes = CONFIGS[name], dict(parse_layout(spec).axes)
    plan, full = plan_to(spec, config), random_weights(config)
    ours = carried_out(plan, full)
    with megatron_rank(config, 0, world_size=axes["tp"], axes=axes) as theirs:
        made = theirs.back(ours)
    assert made.keys() == full.keys()
    for hf_name, weight in full.items():
        np.testing.assert_array_equal(made[hf_name], weight, err_msg=hf_name)
