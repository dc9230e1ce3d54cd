"""What cannot be equal bit for bit is refused at the start, with the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardloop import hf
from shardloop.config import OptimConfig, TrainerConfig
from shardloop.errors import UsageError
from shardloop.invariant import check_invariance
from shardloop.model import DecoderConfig
from shardloop.parallel.context import RankContext
from shardloop.trainer import Trainer
from tests.engines.models import KINDS, make_engine, model_folder, run_threads, weights_of
from tests.harness import run_ranks


def config(kind: str = "llama") -> DecoderConfig:
    return DecoderConfig.from_hf(hf.load_config(model_folder(kind)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_this_machine_passes_the_trial(kind, dtype) -> None:
    check_invariance(config(kind), tp_size=1, dtype=dtype, device="cpu")


TRIAL = """
import torch
from tests.invariant.test_check import KINDS, check_invariance, config
for kind in KINDS:
    for dtype in (torch.float32, torch.float64):
        check_invariance(config(kind), tp_size=1, dtype=dtype, device="cpu")
"""


def test_this_machine_passes_the_trial_with_two_threads_of_older_routines() -> None:
    older = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    threads = {"OMP_NUM_THREADS": "2", "MKL_DYNAMIC": "FALSE"}
    done = subprocess.run(
        [sys.executable, "-c", TRIAL],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **older, **threads},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_bfloat16_is_refused() -> None:
    with pytest.raises(UsageError, match="in bfloat16; choose float32 or float64"):
        check_invariance(config(), tp_size=1, dtype=torch.bfloat16, device="cpu")


def test_an_engine_over_tensor_parallel_ranks_is_refused() -> None:
    weights_of("llama")
    with pytest.raises(UsageError, match=r"tp=2: a sum over ranks has an order of its own"):
        run_threads(lambda comm: make_engine("llama", comm=comm, kernels="invariant"), 2)


def build_cut_trainer(context: RankContext, folder: Path) -> str:
    with pytest.raises(UsageError) as caught:
        Trainer(
            context,
            model_dir=folder,
            config=TrainerConfig(layout="tp=2"),
            optim=OptimConfig(),
            reference=False,
            role="all",
            kernels="invariant",
        )
    return str(caught.value)


def test_a_trainer_over_tensor_parallel_ranks_is_refused() -> None:
    for message in run_ranks(build_cut_trainer, 2, model_folder("llama")):
        assert "tp=2: a sum over ranks has an order of its own" in message


@pytest.mark.parametrize("product", ["mm", "bmm"])
def test_a_library_whose_products_depend_on_the_place_of_a_row_is_refused(
    monkeypatch, product
) -> None:
    honest = getattr(torch, product)

    def uneven(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = honest(x, y)
        # One more rounding for the last rows, as a remainder loop would give.
        out[..., -4:, :] = torch.nextafter(out[..., -4:, :], torch.full_like(out[..., :1, :], 9.0))
        return out

    monkeypatch.setattr(torch, product, uneven)
    with pytest.raises(UsageError, match=r"a product of \[.*depends on what stands beside a row"):
        check_invariance(config(), tp_size=1, dtype=torch.float32, device="cpu")
