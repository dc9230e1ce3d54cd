"""Computing in bfloat16 on float32 weights, and settings that do not go together."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.config import OptimConfig, TrainerConfig
from shardloop.errors import LayoutError, UsageError
from shardloop.parallel.build import check_config
from shardloop.parallel.context import RankContext
from shardloop.parallel.fsdp import full_tensor
from shardloop.parallel.mesh import check_tensor_parallel, trainer_axes
from shardloop.trainer import Trainer
from tests.harness import run_ranks
from tests.models import make_folder
from tests.trainer.batches import make_random_batch
from tests.transport.live import small_model

MIXED = {"compute_dtype": "bfloat16"}
CONFIGS: dict[str, dict[str, Any]] = {
    "float32": {"layout": "fsdp=2"},
    "fsdp": {"layout": "fsdp=2", **MIXED},
    "tp": {"layout": "tp=2", **MIXED},
    "sequence": {"layout": "tp=2", "sequence_parallel": True, **MIXED},
}


def gradients_by_config(context: RankContext, folder: Path) -> dict[str, Any]:
    batch, found = make_random_batch(), {}
    for name, settings in CONFIGS.items():
        trainer = Trainer(
            context,
            model_dir=folder,
            config=TrainerConfig(row_tokens=16, rows_per_micro_batch=2, **settings),
            optim=OptimConfig(),
            reference=False,
            role="all",
        )
        logprobs_N = trainer.logprobs(batch)
        dist.all_reduce(logprobs_N)
        trainer.forward_backward(batch, "sft")
        gradients = [full_tensor(p.grad) for p in trainer._policy.parameters()]
        dtypes = {t.dtype for t in (*gradients, *trainer.shards().values(), logprobs_N)}
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        trainer.step(1e-3)  # scales the gradients
        found[name] = {"dtypes": dtypes, "gradient": flat, "logprobs_N": logprobs_N}
    return found


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_bfloat16_computes_near_float32_and_leaves_float32_weights_and_gradients(tmp_path) -> None:
    for found in run_ranks(gradients_by_config, 2, make_folder(tmp_path, std=0.1), timeout_s=120):
        plain = found.pop("float32")
        for name, mixed in found.items():
            assert mixed["dtypes"] == {torch.float32}
            for what in ("gradient", "logprobs_N"):
                assert 1e-5 < relative(mixed[what], plain[what]) < 0.05, (name, what)


def test_sequence_parallelism_without_tp_is_refused() -> None:
    sequence = TrainerConfig(layout="fsdp=2", sequence_parallel=True)
    with pytest.raises(UsageError, match="add tp=2 or more to the layout"):
        check_config(sequence, has_tp=False)
    check_config(sequence, has_tp=True)


@pytest.mark.parametrize(
    ("tp", "fault"),
    [
        (3, "num_heads=4, num_kv_heads=2, intermediate_size=40"),
        (4, "num_kv_heads=2"),
        (8, "num_heads=4, num_kv_heads=2"),
    ],
)
def test_a_tp_that_would_split_or_copy_heads_is_refused(tp, fault) -> None:
    model = small_model()
    with pytest.raises(LayoutError, match=f"tp={tp} does not divide {fault}; choose tp from 1, 2$"):
        check_tensor_parallel(model, tp)
    check_tensor_parallel(model, 2)


def test_axes_that_are_left_out_have_size_1() -> None:
    assert trainer_axes("tp=2") == {"dp": 1, "fsdp": 1, "tp": 2}
    assert trainer_axes("dp=2,tp=4") == {"dp": 2, "fsdp": 1, "tp": 4}
    assert trainer_axes("dp=2,fsdp=3,tp=4") == {"dp": 2, "fsdp": 3, "tp": 4}
