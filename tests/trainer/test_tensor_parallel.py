"""Cutting layers over ranks, tokens over ranks, or recomputing activations is invisible in weights,
gradients, norms and log-probs."""

import pytest

from tests.harness import run_ranks
from tests.models import make_folder
from tests.trainer.test_fsdp_equal import (
    assert_equal_runs,
    make_batches,
    reference_run,
    trainer_runs,
)

PADDED = {"row_tokens": 2, "rows_per_micro_batch": 8}
PACKED = {"row_tokens": 25, "rows_per_micro_batch": 2}
SEQUENCE = {"sequence_parallel": True}
RECOMPUTED = {"activation_checkpointing": True}
CONFIGS = (PACKED | RECOMPUTED, PADDED | SEQUENCE)
QK_NORM, QKV_BIAS = "qwen3", "qwen2"


@pytest.mark.parametrize(
    ("layout", "num_ranks", "family", "tied", "configs"),
    [
        ("tp=2", 2, QK_NORM, True, CONFIGS),
        ("tp=2", 2, QKV_BIAS, False, CONFIGS),
        ("fsdp=2,tp=2", 4, QK_NORM, False, CONFIGS),
        ("fsdp=2,tp=2", 4, QKV_BIAS, True, (PADDED | SEQUENCE | RECOMPUTED,)),
        ("dp=2,tp=2", 4, QK_NORM, True, CONFIGS[1:]),
    ],
)
def test_gradients_and_weights_do_not_depend_on_tensor_parallelism(
    tmp_path, seed, layout, num_ranks, family, tied, configs
) -> None:
    # 33 rows of vocabulary: over two ranks 17 and 16, and these over two more 9, 8, 8, 8.
    folder = make_folder(tmp_path, family, tied=tied)
    batches = make_batches(folder, seed)
    configs = [{"layout": layout, **settings} for settings in configs]
    by_rank = run_ranks(trainer_runs, num_ranks, folder, configs, batches, timeout_s=120)
    assert_equal_runs(by_rank, reference_run(folder, batches))
