"""Number of ranks, rows and micro-batches are invisible in losses, gradients and weights.

What the trainer should do is written out once more here: one process, one sequence at a time, and
full logits.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardloop import hf
from shardloop.config import GRPOConfig, OptimConfig, TrainerConfig
from shardloop.parallel.context import RankContext
from shardloop.parallel.fsdp import full_tensor
from shardloop.rl.batch import Batch
from shardloop.trainer import Trainer
from tests.harness import run_ranks
from tests.models import make_folder
from tests.trainer.batches import make_random_batch

OPTIM = OptimConfig(lr=0.01, max_grad_norm=0.5, weight_decay=0.1)
GRPO = GRPOConfig(kl_coef=0.3, entropy_coef=0.2)
LOSSES = (GRPO, "sft", GRPO)
PACKINGS = ((2, 1), (12, 3), (40, 1), (200, 8))
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def make_batches(folder: Path, seed: int) -> list[Batch]:
    """Three batches whose old and reference log-probs lie near the policy's."""
    model = hf.load_model(folder, dtype=torch.float64)
    batches = [make_random_batch(seed=seed + step, num_rows=5 + step) for step in range(3)]
    return [
        dataclasses.replace(
            batch,
            old_N=full_scores(model, batch)[0].detach() + 0.1 * (batch.old_N + 3.0),
            ref_N=full_scores(model, batch)[0].detach() + 0.1 * (batch.ref_N + 3.0),
        )
        for batch in batches
    ]


def reference_run(folder: Path, batches: Sequence[Batch]) -> dict[str, Any]:
    """Losses, first gradients, norms and final weights by the plainest means."""
    start, model = (hf.load_model(folder, dtype=torch.float64) for _ in range(2))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    losses, norms, gradients = [], [], {}
    for batch, kind in zip(batches, LOSSES, strict=True):
        new_N, entropy_N = full_scores(model, batch)
        if kind == "sft":
            per_token_N = -new_N
        else:
            ratio_N = (new_N - batch.old_N).exp()
            gain_N = batch.advantages_N
            clipped_N = torch.minimum(ratio_N * gain_N, ratio_N.clamp(0.8, 1.2) * gain_N)
            log_N = batch.ref_N - new_N
            per_token_N = -clipped_N * batch.weights_N + 0.3 * (log_N.exp() - 1 - log_N)
            per_token_N = per_token_N - 0.2 * entropy_N
        loss = per_token_N[batch.loss_mask_N].sum() / batch.loss_mask_N.sum()
        loss.backward()
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "logprobs_N": full_scores(start, batches[0])[0].detach() * batches[0].loss_mask_N,
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "weights": {n: p.detach() for n, p in model.named_parameters()},
    }


def full_scores(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of every token and entropy of its distribution, 0 for the first of a row."""
    scores, entropies = [], []
    for row in torch.split(batch.token_ids_N, batch.lengths):
        logits_TV = model(row[None], use_cache=False).logits[0] / batch.temperature
        all_TV = logits_TV.log_softmax(-1)[:-1]
        zero = all_TV.new_zeros(1)
        scores += [zero, all_TV.gather(1, row[1:, None])[:, 0]]
        entropies += [zero, -(all_TV.exp() * all_TV).sum(-1)]
    return torch.cat(scores), torch.cat(entropies)


def trainer_runs(
    context: RankContext,
    folder: Path,
    configs: Sequence[dict[str, Any]],
    batches: Sequence[Batch],
) -> list[dict[str, Any]]:
    """What `reference_run` returns, by one trainer per config, and the log-probs of the first
    batch; losses and log-probs are one rank's part."""
    runs = []
    for settings in configs:
        trainer = Trainer(
            context,
            model_dir=folder,
            config=TrainerConfig(dtype="float64", **settings),
            optim=OPTIM,
            reference=False,
            role="all",
        )
        logprobs_N = trainer.logprobs(batches[0])
        losses, norms, gradients = [], [], {}
        for batch, kind in zip(batches, LOSSES, strict=True):
            losses.append(trainer.forward_backward(batch, kind)["loss"])
            parameters = dict(trainer._policy.named_parameters())
            gradients = gradients or {n: full_tensor(p.grad).clone() for n, p in parameters.items()}
            norms.append(trainer.step(0.01)["grad_norm"])
        weights = {n: full_tensor(p) for n, p in trainer._policy.named_parameters()}
        shapes = {n: tuple(t.shape) for n, t in trainer.shards().items()}
        declared = trainer.layout().local_shapes(context.rank)
        runs.append(
            {
                "logprobs_N": logprobs_N,
                "losses": losses,
                "norms": norms,
                "gradients": gradients if context.rank == 0 else {},
                "weights": weights if context.rank == 0 else {},
                "shapes": shapes,
                "declared": declared,
            }
        )
    return runs


@pytest.mark.parametrize(
    ("layout", "num_ranks", "packings"),
    [
        ("fsdp=1", 1, PACKINGS),
        ("fsdp=2", 2, PACKINGS),
        ("fsdp=3", 3, PACKINGS[1:2]),
        ("dp=2", 2, PACKINGS[1:2]),
        ("dp=2,fsdp=2", 4, PACKINGS[1:2]),
    ],
)
def test_loss_gradients_and_weights_do_not_depend_on_ranks_or_packing(
    tmp_path, seed, layout, num_ranks, packings
) -> None:
    # head_dim 2: over three ranks the q and k norms have an empty shard.
    folder = make_folder(tmp_path, tied=num_ranks != 3, head_dim=2)
    batches = make_batches(folder, seed)
    configs = [
        {"layout": layout, "row_tokens": row_tokens, "rows_per_micro_batch": rows}
        for row_tokens, rows in packings
    ]
    by_rank = run_ranks(trainer_runs, num_ranks, folder, configs, batches)
    assert_equal_runs(by_rank, reference_run(folder, batches))
    if num_ranks == 3:
        assert (0,) in by_rank[2][0]["shapes"].values()


def assert_equal_runs(by_rank: Sequence[list[dict[str, Any]]], expected: dict[str, Any]) -> None:
    """Every run agrees with the reference, in all it has, and all ranks with each other."""
    for runs in zip(*by_rank, strict=True):
        first = runs[0]
        losses = torch.tensor([run["losses"] for run in runs], dtype=torch.float64).sum(0)
        torch.testing.assert_close(losses.tolist(), expected["losses"], **TOLERANCE)
        logprobs_N = torch.stack([run["logprobs_N"] for run in runs]).sum(0)
        torch.testing.assert_close(logprobs_N, expected["logprobs_N"], **TOLERANCE)
        assert all(run["norms"] == first["norms"] for run in runs)
        torch.testing.assert_close(first["norms"], expected["norms"], **TOLERANCE)
        torch.testing.assert_close(first["gradients"], expected["gradients"], **TOLERANCE)
        torch.testing.assert_close(first["weights"], expected["weights"], **TOLERANCE)
        assert all(run["shapes"] == run["declared"] for run in runs)
