"""The engine on tensor-parallel ranks against the trainer on the same ranks."""

import pytest
import torch
import torch.distributed as dist

from shardloop import hf
from shardloop.config import OptimConfig, TrainerConfig
from shardloop.parallel.tp import ProcessGroupTP
from shardloop.rl.batch import make_batch
from shardloop.trainer import Trainer
from tests.engines.models import empty_engine, make_requests, model_folder
from tests.harness import run_ranks

KINDS = ("llama", "qwen2-tied", "qwen3")
CONFIG = TrainerConfig(layout="fsdp=2", dtype="float64", row_tokens=64, rows_per_micro_batch=2)
REQUESTS = make_requests(max_tokens=20, temperature=0.6, top_p=0.9)


def log_probs_of_both(context, folders):
    found = []
    for folder in folders:
        weights, config = hf.load_weights(folder), hf.load_config(folder)
        engine = empty_engine(config, comm=ProcessGroupTP(context.group("all")), max_slots=5)
        engine.load_from_state_dict(weights)
        batch = make_batch(
            engine.generate(REQUESTS), torch.zeros(len(REQUESTS), dtype=torch.float64)
        )
        trainer = Trainer(
            context,
            model_dir=folder,
            config=CONFIG,
            optim=OptimConfig(),
            reference=False,
            role="all",
        )
        old_N = trainer.logprobs(batch)
        dist.all_reduce(old_N)
        found.append((batch, old_N))
    return found


@pytest.fixture(scope="module")
def log_probs():
    found, _ = run_ranks(log_probs_of_both, 2, [model_folder(kind) for kind in KINDS])
    return dict(zip(KINDS, found, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_engine_and_trainer_agree_on_every_sampled_token_in_float64(log_probs, kind):
    batch, old_N = log_probs[kind]
    assert batch.num_loss_tokens == 20 * len(REQUESTS)
    assert (old_N[batch.loss_mask_N] < 0).all()
    torch.testing.assert_close(old_N, batch.full_N, rtol=0, atol=1e-12)
