"""What one micro-batch adds to the loss and metrics of its batch. Floor 2; for the trainer.

Shape letters: N tokens of the batch, n scored tokens of a micro-batch.
"""

from typing import Literal

from torch import Tensor

from shardloop.config import GRPOConfig
from shardloop.errors import UsageError
from shardloop.rl.batch import Batch
from shardloop.rl.kl import kl_k3
from shardloop.rl.losses import ppo_clip_loss
from shardloop.rl.packing import PackedRows


def check_batch(batch: Batch, loss: GRPOConfig | Literal["sft"]) -> None:
    """
    Raises:
        UsageError: the batch lacks values that the loss needs.
    """
    if loss == "sft":
        return
    needed = {"advantages_N": True, "old_N": True}
    needed |= {"ref_N": loss.kl_coef > 0.0, "weights_N": loss.correction != "none"}
    missing = [name for name in needed if needed[name] and getattr(batch, name) is None]
    if missing:
        raise UsageError(
            f"the batch lacks {', '.join(missing)}, which GRPO with kl_coef={loss.kl_coef} and "
            f"correction={loss.correction!r} needs; fill them in with dataclasses.replace"
        )


def sft_objective(new_n: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood of a micro-batch over the loss tokens of the whole batch."""
    return -new_n.sum() / max(1, batch.num_loss_tokens), {}


def grpo_objective(
    new_n: Tensor, batch: Batch, packed: PackedRows, config: GRPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped loss plus weighted k3 KL of a micro-batch, over the whole batch's loss tokens."""

    def of_micro_batch(values_N: Tensor) -> Tensor:
        return values_N[packed.flat_index_n].to(new_n)

    assert batch.old_N is not None and batch.advantages_N is not None
    weights_N = batch.weights_N if config.correction != "none" else None
    policy = ppo_clip_loss(
        new_n,
        of_micro_batch(batch.old_N),
        of_micro_batch(batch.advantages_N),
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        denominator=batch.num_loss_tokens,
        weights_n=None if weights_N is None else of_micro_batch(weights_N),
    )
    parts = {
        "policy_loss": policy.loss.detach(),
        "clip_fraction": policy.clip_fraction,
        "approx_kl": policy.approx_kl,
        "ratio": policy.ratio,
    }
    objective = policy.loss
    if config.kl_coef > 0.0:
        assert batch.ref_N is not None
        kl = kl_k3(new_n, of_micro_batch(batch.ref_N)).sum() / max(1, batch.num_loss_tokens)
        objective = objective + config.kl_coef * kl
        parts["kl"] = kl.detach()
    return objective, parts
