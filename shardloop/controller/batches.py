"""From judged groups to the batch that one step trains on. Called by the loop. Floor 4.

    groups ─▶ make ─▶ recompute ─▶ advantages ─▶ batch
               │         │            │
               │         │            └─ from rewards, less the KL where it goes there
               │         └─ old, reference and correction weights: the trainer's log-probs
               └─ tokens, loss mask and the scale of every token's loss

All denominators are those of the whole batch; the trainer cuts it later.

Shape letters: P prompts, G samples per prompt, B rows (P x G), N tokens of all rows.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardloop.config import GRPOConfig, TrainConfig
from shardloop.controller.groups import WorkerGroup
from shardloop.controller.rounds import Group, is_masked
from shardloop.rl.advantages import group_advantages
from shardloop.rl.aggregation import token_scales
from shardloop.rl.batch import Batch, make_batch
from shardloop.rl.correction import correction_weights
from shardloop.rl.kl import KL_ESTIMATORS, kl_k3
from shardloop.types import Completion

Metrics = dict[str, Any]


def make_step_batch(groups: Sequence[Group], config: TrainConfig) -> Batch:
    """Tokens, masks and scales; advantages are 0 as yet.

    Values are float64 where the trainer computes in it, else float32. With `grpo.overlong` "mask"
    the completions that reached max_tokens have no loss tokens; perhaps none has any.
    """
    grpo = config.grpo
    wide = torch.promote_types(getattr(torch, config.trainer.dtype), torch.float32)
    rows = [(place, c) for place, g in enumerate(groups) for c in g.rollout.completions]
    completions = [_without_loss(c) if is_masked(c, grpo) else c for _, c in rows]
    batch = make_batch(completions, torch.zeros(len(rows), dtype=wide))
    scale_N = token_scales(
        grpo.aggregation,
        mask_N=batch.loss_mask_N,
        offsets=batch.offsets,
        group_B=torch.tensor([place for place, _ in rows]),
        constant=_constant(config),
    )
    return replace(batch, scale_N=scale_N)


def _constant(config: TrainConfig) -> int | None:
    if config.grpo.aggregation != "sequence-sum":
        return None
    return config.grpo.aggregation_constant or config.sampling.max_tokens


def _without_loss(completion: Completion) -> Completion:
    return replace(completion, loss_mask_T=(0,) * len(completion.loss_mask_T))


def recompute(trainer: WorkerGroup, batch: Batch, grpo: GRPOConfig) -> tuple[Batch, Metrics]:
    """Add the trainer's own log-probs, the reference's for a KL term, and the correction weights.

    Returns:
        The fuller batch; and gap_mean and gap_max of |old - engine's full log-prob| over the loss
        tokens, ess and cut_fraction of the correction, and kl (k3 to the reference, exactly 0 while
        both have the same weights).
    """
    assert batch.full_N is not None, "made from completions"
    old_N: Tensor = trainer.call("logprobs", batch, collect="sum")
    correction = correction_weights(
        old_N,
        batch.full_N,
        kind=grpo.correction,
        mode=grpo.correction_mode,
        cap=grpo.correction_cap,
        floor=grpo.correction_floor,
        mask_N=batch.loss_mask_N,
        offsets=batch.offsets,
    )
    metrics = {
        "gap_mean": correction.gap_mean,
        "gap_max": correction.gap_max,
        "ess": correction.ess,
        "cut_fraction": correction.cut_fraction,
    }
    batch = replace(batch, old_N=old_N, weights_N=correction.weights_N)
    if grpo.kl_coef > 0.0:
        ref_N: Tensor = trainer.call("logprobs", batch, policy="reference", collect="sum")
        kl_n = kl_k3(old_N, ref_N)[batch.loss_mask_N]
        metrics["kl"] = kl_n.sum().item() / max(1, len(kl_n))
        batch = replace(batch, ref_N=ref_N)
    return batch, metrics


def add_advantages(batch: Batch, groups: Sequence[Group], grpo: GRPOConfig) -> Batch:
    """Advantages of the groups' rewards, spread over each completion's loss tokens.

    With `grpo.kl_in` "reward" each reward first loses kl_coef x the sum of the KL estimate over the
    completion's loss tokens. A completion without loss tokens still counts in its group's mean,
    by its reward alone: as a baseline of the others it may be any number.
    """
    rewards_PG = torch.stack([group.shaped_G for group in groups])
    if _is_kl_in_reward(grpo):
        rewards_PG = rewards_PG - grpo.kl_coef * kl_of_rows(batch, grpo).view_as(rewards_PG)
    num_tokens_B = _row_sums(batch.loss_mask_N.long(), batch.offsets)
    advantages_PG = group_advantages(
        grpo.advantage,
        rewards_PG,
        std=grpo.std,
        num_tokens_PG=num_tokens_B.view_as(rewards_PG),
    )
    assert batch.advantages_N is not None, "made with zeros"
    advantages_N = advantages_PG.flatten().repeat_interleave(batch.offsets.diff())
    return replace(
        batch,
        advantages_N=advantages_N.masked_fill(~batch.loss_mask_N, 0.0).to(batch.advantages_N),
    )


def kl_of_rows(batch: Batch, grpo: GRPOConfig) -> Tensor:
    """float64 [B]: Σ of the KL estimate of old to the reference over each row's loss tokens."""
    assert batch.old_N is not None and batch.ref_N is not None, "recomputed"
    kl_N = KL_ESTIMATORS[grpo.kl_kind](batch.old_N.double(), batch.ref_N.double())
    return _row_sums(kl_N.masked_fill(~batch.loss_mask_N, 0.0), batch.offsets)


def _row_sums(values_N: Tensor, offsets: Tensor) -> Tensor:
    num_rows = len(offsets) - 1
    row_N = torch.arange(num_rows).repeat_interleave(offsets.diff())
    return values_N.new_zeros(num_rows).index_add(0, row_N, values_N)


def has_signal(batch: Batch, grpo: GRPOConfig) -> bool:
    """Whether the loss can have a gradient: an advantage that is not 0 and that the correction does
    not mask out, or a term besides."""
    assert batch.advantages_N is not None and batch.weights_N is not None
    has_term = grpo.entropy_coef > 0.0 or (grpo.kl_coef > 0.0 and not _is_kl_in_reward(grpo))
    return has_term or bool(((batch.advantages_N != 0) & (batch.weights_N != 0)).any())


def _is_kl_in_reward(grpo: GRPOConfig) -> bool:
    return grpo.kl_coef > 0.0 and grpo.kl_in == "reward"
