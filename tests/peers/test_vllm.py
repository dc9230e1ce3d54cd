"""Our engine layouts against vLLM's own models and weight loaders, on simulated ranks.

vLLM cannot live in our environment. SHARDLOOP_VLLM_PYTHON names the interpreter of one that has
it; `benchmarks/vllm_env.sh` makes one. All cases run in one process there: vLLM starts slowly.

vLLM 0.32 keeps experts one module deeper than our engine layouts and older releases name them:
`mlp.experts.routed_experts.w13_weight` is our `mlp.experts.w13_weight`. The tests map the name.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.families.configs import moe_config
from tests.layout.reference import tiny_config
from tests.peers.inprocess import carried_out, plan_to, random_weights

PYTHON = os.environ.get("SHARDLOOP_VLLM_PYTHON")
SCRIPT = Path(__file__).with_name("vllm_ranks.py")
pytestmark = [
    pytest.mark.optional,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        PYTHON is None,
        reason="SHARDLOOP_VLLM_PYTHON names no interpreter with vLLM; see benchmarks/vllm_env.sh",
    ),
]

SIZES = {
    "vocab_size": 128,  # of others, vLLM pads to a multiple of 64
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
MOE = {**SIZES, "moe_intermediate_size": 32}
LATENT = {**MOE, "num_attention_heads": 4, "num_key_value_heads": 4, "topk_method": "noaux_tc"}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": tiny_config("llama", **SIZES),
    "Qwen2ForCausalLM": tiny_config("qwen2", **{**SIZES, "hidden_size": 256}),  # reads no head_dim
    "Qwen3ForCausalLM": tiny_config("qwen3", tie_word_embeddings=True, **SIZES),
    "Qwen3MoeForCausalLM": moe_config("qwen3_moe", **MOE),
    "MixtralForCausalLM": moe_config("mixtral", **{**SIZES, "num_local_experts": 4}),
    "DeepseekV3ForCausalLM": moe_config("deepseek_v3", **LATENT),
}
CASES = [
    (name, tp, expert_parallel)
    for name, config in CONFIGS.items()
    for tp in (1, 2, 4)
    for expert_parallel in (False, True)
    if (tp > 1 and "num_experts_per_tok" in config) or not expert_parallel
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By architecture: its config, its weights, and what each rank of each case has of them."""
    root = tmp_path_factory.mktemp("vllm")
    made = {name: root / name for name in CONFIGS}
    for name, config in CONFIGS.items():
        AutoConfig.for_model(**config, architectures=[name]).save_pretrained(made[name])
        save_file(random_weights(config), made[name] / "weights.safetensors")
    cases = [
        {"folder": str(made[name]), "tp": tp, "expert_parallel": expert_parallel}
        for name, tp, expert_parallel in CASES
    ]
    (root / "cases.json").write_text(json.dumps(cases))
    command = [str(PYTHON), "-W", "ignore", str(SCRIPT), str(root / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return made


@pytest.mark.parametrize(("name", "tp", "expert_parallel"), CASES)
def test_every_rank_holds_what_the_loaders_of_vllm_put_there(
    folders: dict[str, Path], name: str, tp: int, expert_parallel: bool
) -> None:
    config = CONFIGS[name]
    spec = f"engine:tp={tp},ep={tp}" if expert_parallel else f"engine:tp={tp}"
    ours = carried_out(plan_to(spec, config), random_weights(config))
    for rank, local in enumerate(ours):
        theirs = {
            key.replace(".experts.routed_experts.", ".experts."): weight
            for key, weight in load_file(
                folders[name] / f"{tp}-{expert_parallel}-{rank}.safetensors"
            ).items()
        }
        assert {n: tuple(t.shape) for n, t in local.items()} == {
            n: tuple(t.shape) for n, t in theirs.items()
        }
        for key, weight in theirs.items():
            np.testing.assert_array_equal(local[key], weight, err_msg=f"{rank} {key}")
