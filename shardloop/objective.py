"""What one micro-batch adds to the loss and metrics of its batch. Floor 2; for the trainer.

Shape letters: N tokens of the batch, n scored tokens of a micro-batch.
"""

from typing import Literal

import torch
from torch import Tensor

from shardloop.config import GRPOConfig
from shardloop.errors import UsageError
from shardloop.rl.batch import Batch
from shardloop.rl.kl import KL_ESTIMATORS
from shardloop.rl.losses import TokenLoss, cispo_loss, gspo_loss, ppo_clip_loss
from shardloop.rl.packing import PackedRows


def check_batch(batch: Batch, loss: GRPOConfig | Literal["sft"]) -> None:
    """
    Raises:
        UsageError: the batch lacks values that the loss needs.
    """
    if loss == "sft":
        return
    needed = {
        "advantages_N": True,
        "old_N": True,
        "ref_N": _has_kl_term(loss),
        "weights_N": loss.correction != "none",
        "scale_N": loss.aggregation != "token-mean",
    }
    missing = [name for name in needed if needed[name] and getattr(batch, name) is None]
    if missing:
        raise UsageError(
            f"the batch lacks {', '.join(missing)}, which GRPO with kl_coef={loss.kl_coef}, "
            f"correction={loss.correction!r} and aggregation={loss.aggregation!r} needs; "
            "fill them in with dataclasses.replace"
        )


def sft_objective(new_n: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of a micro-batch over the loss tokens of the whole batch."""
    return -new_n.sum() / max(1, batch.num_loss_tokens), {}


def grpo_objective(
    new_n: Tensor, entropy_n: Tensor, batch: Batch, packed: PackedRows, config: GRPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Σ scale (weight policy_loss + kl_coef kl - entropy_coef entropy) over a micro-batch's tokens.

    The scales are those of the whole batch, so the sum over micro-batches and ranks is the loss of
    the batch at any split. The KL term is here only with kl_in "loss".

    Args:
        new_n, entropy_n: log-prob of each scored token and entropy of its distribution, both with
            gradient.
    Returns:
        The objective; and its detached parts `policy_loss` and (with a KL term) `kl`, and the means
        over all loss tokens of the batch of `clip_fraction`, `ratio` and `approx_kl` (ratio - 1 -
        log ratio, which estimates KL(old || new) and is never negative). All of them add up over
        micro-batches and ranks.
    """
    num_tokens = max(1, batch.num_loss_tokens)
    policy = _token_loss(new_n, batch, packed, config)
    scale_n = (
        torch.full_like(new_n, 1.0 / num_tokens, requires_grad=False)
        if batch.scale_N is None
        else batch.scale_N[packed.flat_index_n].to(new_n)
    )
    weight_n = scale_n
    if config.correction != "none":
        assert batch.weights_N is not None
        weight_n = scale_n * batch.weights_N[packed.flat_index_n].to(new_n)
    policy_loss = (weight_n * policy.loss_n).sum()
    log_ratio_n = policy.log_ratio_n
    parts = {
        "policy_loss": policy_loss.detach(),
        "clip_fraction": policy.is_clipped_n.to(new_n.dtype).sum() / num_tokens,
        "approx_kl": (torch.expm1(log_ratio_n) - log_ratio_n).sum() / num_tokens,
        "ratio": log_ratio_n.exp().sum() / num_tokens,
    }
    objective = policy_loss
    if _has_kl_term(config):
        assert batch.ref_N is not None
        kl_n = KL_ESTIMATORS[config.kl_kind](new_n, batch.ref_N[packed.flat_index_n].to(new_n))
        objective = objective + config.kl_coef * (scale_n * kl_n).sum()
        parts["kl"] = kl_n.detach().sum() / num_tokens
    if config.entropy_coef > 0.0:
        objective = objective - config.entropy_coef * (scale_n * entropy_n).sum()
    return objective, parts


def _has_kl_term(config: GRPOConfig) -> bool:
    return config.kl_coef > 0.0 and config.kl_in == "loss"


def _token_loss(new_n: Tensor, batch: Batch, packed: PackedRows, config: GRPOConfig) -> TokenLoss:
    assert batch.old_N is not None and batch.advantages_N is not None
    flat_index_n = packed.flat_index_n
    old_n = batch.old_N[flat_index_n].to(new_n)
    advantages_n = batch.advantages_N[flat_index_n].to(new_n)
    clip_low, clip_high = config.clip_low, config.clip_high
    if config.loss == "gspo":
        row_n = torch.bucketize(flat_index_n, batch.offsets[1:], right=True).to(new_n.device)
        return gspo_loss(
            new_n, old_n, advantages_n, row_n=row_n, clip_low=clip_low, clip_high=clip_high
        )
    if config.loss == "cispo":
        return cispo_loss(new_n, old_n, advantages_n, clip_low=clip_low, clip_high=clip_high)
    return ppo_clip_loss(
        new_n,
        old_n,
        advantages_n,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=config.dual_clip,
    )
