"""Rows that teach nothing are passed over, and padding is added, without a trace in the update."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from shardloop import hf, trainer
from shardloop.config import GRPOConfig, OptimConfig, TrainerConfig
from shardloop.micro_batches import pad_rows, silent_rows, without_silent_rows
from shardloop.parallel.context import RankContext
from shardloop.policy import Policy
from shardloop.rl.batch import Batch
from shardloop.rl.packing import pack
from shardloop.trainer import Trainer
from tests.harness import run_ranks
from tests.models import make_folder
from tests.trainer.batches import make_random_batch
from tests.trainer.test_policy import score

GRPO = GRPOConfig(kl_coef=0.0)
FLAT = (2, 3, 6)
"""Rows without advantage, besides row 1, which has no loss token."""


def half_flat_batch(seed: int) -> Batch:
    batch = make_random_batch(seed=seed)
    advantages_N = batch.advantages_N.clone()
    for row in FLAT:
        advantages_N[batch.offsets[row] : batch.offsets[row + 1]] = 0.0
    return dataclasses.replace(batch, advantages_N=advantages_N)


def test_silent_rows_are_those_without_advantage_unless_all_are(seed) -> None:
    batch = half_flat_batch(seed)
    assert silent_rows(batch).nonzero().squeeze(1).tolist() == [1, *FLAT]
    without = dataclasses.replace(batch, advantages_N=torch.zeros_like(batch.advantages_N))
    assert not silent_rows(without).any()
    assert not silent_rows(dataclasses.replace(batch, advantages_N=None)).any()


def test_the_weight_of_a_loss_token_stays_that_in_the_whole_batch(seed) -> None:
    batch = half_flat_batch(seed)
    rest = without_silent_rows(batch)
    assert 0 < rest.num_loss_tokens < batch.num_loss_tokens
    assert set(rest.scale_N.tolist()) == {1.0 / batch.num_loss_tokens}
    scale_N = torch.rand(len(batch.token_ids_N), dtype=torch.float64)
    weighted = dataclasses.replace(batch, scale_N=scale_N)
    assert torch.equal(without_silent_rows(weighted).scale_N, scale_N)


def updates_with_and_without(context: RankContext, folder: Path, batch: Batch) -> Any:
    policy = Trainer(
        context,
        model_dir=folder,
        config=TrainerConfig(layout="fsdp=1", dtype="float64", row_tokens=16),
        optim=OptimConfig(),
        reference=False,
        role="all",
    )
    batch = dataclasses.replace(batch, old_N=policy.logprobs(batch))
    runs = []
    for needs in (trainer.needs_silent_rows, lambda loss: True):
        trainer.needs_silent_rows = needs
        metrics = policy.forward_backward(batch, GRPO)
        gradients = {n: p.grad.to_local().clone() for n, p in policy._policy.named_parameters()}
        policy._optimizer.zero_grad()
        runs.append((metrics, gradients))
    return runs


def test_passing_over_silent_rows_changes_neither_loss_nor_gradient(tmp_path, seed) -> None:
    folder, batch = make_folder(tmp_path), half_flat_batch(seed)
    ((few, few_gradients), (all_, all_gradients)) = run_ranks(
        updates_with_and_without, 1, folder, batch, timeout_s=120
    )[0]
    torch.testing.assert_close(few_gradients, all_gradients, rtol=1e-10, atol=1e-12)
    for name in ("loss", "policy_loss"):
        assert few[name] == pytest.approx(all_[name], rel=1e-12)
    # Means are over what was trained: the log-probs of the pass before, bit for bit.
    assert few["ratio"] == pytest.approx(1.0, abs=1e-12)
    assert few["approx_kl"] == 0.0
    assert few["entropy"] != all_["entropy"]


@pytest.mark.parametrize("multiple", [2, 3, 8])
def test_wider_rows_have_the_same_log_probs(tmp_path, seed, multiple) -> None:
    policy = Policy(hf.load_model(make_folder(tmp_path), dtype=torch.float64)).eval()
    batch = make_random_batch(seed=seed)
    packed = pack(batch, [[0, 1], [2], [3, 4, 5]])
    padded = pad_rows(packed, multiple=multiple)
    assert padded.input_ids_BT.shape[1] % multiple == 0
    expected_n = score(policy, packed, batch.temperature)
    torch.testing.assert_close(score(policy, padded, batch.temperature), expected_n)
