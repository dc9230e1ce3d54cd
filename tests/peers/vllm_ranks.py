"""Builds vLLM's models as any rank of any world has them, and fills them by its own loaders.

Run by `test_vllm` in an interpreter that has vLLM (CPU build); imports nothing of this project.

    python vllm_ranks.py CASES.json

Each case is {"folder", "tp", "expert_parallel"}; the folder holds config.json and
weights.safetensors. What each rank has is written beside them, as
TP-EXPERT_PARALLEL-RANK.safetensors.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

GROUPS_OF_ONE = ("_PP", "_DP", "_PCP", "_DCP", "_EPLB")


def group(size: int, rank: int) -> Any:
    """All that a model asks of its process group while it is built and filled."""
    return SimpleNamespace(
        world_size=size,
        rank_in_group=rank,
        rank=rank,
        local_rank=rank,
        ranks=list(range(size)),
        is_first_rank=rank == 0,
        is_last_rank=rank == size - 1,
        device_group=SimpleNamespace(size=lambda: size, rank=lambda: rank),
    )


def build(folder: Path, *, tp: int, rank: int, expert_parallel: bool) -> Any:
    for name in GROUPS_OF_ONE:
        setattr(parallel_state, name, group(1, 0))
    for name in ("_WORLD", "_TP", "_EP"):
        setattr(parallel_state, name, group(tp, rank))
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        load_format="dummy",
    ).create_engine_config()
    config.parallel_config.tensor_parallel_size = tp
    config.parallel_config.enable_expert_parallel = expert_parallel
    with set_current_vllm_config(config):
        return initialize_model(config)


def main() -> None:
    for case in json.loads(Path(sys.argv[1]).read_text()):
        folder, tp, expert_parallel = Path(case["folder"]), case["tp"], case["expert_parallel"]
        weights = load_file(folder / "weights.safetensors")
        for rank in range(tp):
            model = build(folder, tp=tp, rank=rank, expert_parallel=expert_parallel)
            model.load_weights(iter(weights.items()))
            held = {name: p.detach().clone().contiguous() for name, p in model.named_parameters()}
            save_file(held, folder / f"{tp}-{expert_parallel}-{rank}.safetensors")


if __name__ == "__main__":
    main()
