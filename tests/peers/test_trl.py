"""Our numbers against TRL's own functions; needs the extra `peers`."""

from dataclasses import dataclass
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardloop.config import Aggregation, GRPOConfig, PolicyLossKind
from shardloop.head import token_logprobs
from shardloop.objective import grpo_objective
from shardloop.rl.aggregation import token_scales
from shardloop.rl.batch import Batch
from shardloop.rl.packing import pack
from tests.peers.padded import ROWS, TOKENS, Padded, random_padded

pytestmark = [pytest.mark.optional, pytest.mark.filterwarnings("ignore")]

CLIP_LOW, CLIP_HIGH, BETA = 0.2, 0.28, 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprob_entropy_and_gradient_are_those_of_trl(temperature: float) -> None:
    peer = pytest.importorskip("trl.trainer.utils")
    generator = torch.Generator().manual_seed(0)
    hidden_nD = torch.randn(37, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    weight_VD = torch.randn(101, 16, generator=generator, dtype=torch.float64, requires_grad=True)
    target_ids_n = torch.randint(0, 101, (37,), generator=generator)
    logprobs_n, entropy_n = token_logprobs(
        hidden_nD, weight_VD, target_ids_n, temperature=temperature, chunk=8
    )
    logits_nV = hidden_nD @ weight_VD.T / temperature
    theirs_n = peer.selective_log_softmax(logits_nV, target_ids_n)
    torch.testing.assert_close(logprobs_n, theirs_n, atol=1e-10, rtol=0)
    torch.testing.assert_close(entropy_n, peer.entropy_from_logits(logits_nV), atol=1e-10, rtol=0)
    upstream_n = torch.randn(37, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad((logprobs_n * upstream_n).sum(), (hidden_nD, weight_VD))
    theirs = torch.autograd.grad((theirs_n * upstream_n).sum(), (hidden_nD, weight_VD))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-10, rtol=0)


@dataclass
class Arguments:
    delta: float | None = None
    use_bias_correction_kl: bool = False
    steps_per_generation: int = 1


def trl_loss(padded: Padded, *, loss_type: str, level: str, delta: float | None) -> Tensor:
    """`GRPOTrainer._compute_loss` on given log-probs: all of a trainer that it looks at."""
    peer = pytest.importorskip("trl.trainer.grpo_trainer")
    trainer = MagicMock()
    trainer._get_per_token_logps_and_entropies.return_value = (
        padded.new_BT,
        torch.zeros_like(padded.new_BT),
        None,
    )
    trainer.loss_type, trainer.importance_sampling_level = loss_type, level
    trainer.epsilon_low, trainer.epsilon_high = CLIP_LOW, CLIP_HIGH
    if loss_type == "cispo":
        trainer.epsilon_high = 1.0 + CLIP_HIGH  # the bound itself there
    trainer.args = Arguments(delta=delta)
    trainer.beta, trainer.top_entropy_quantile = BETA, 1.0
    trainer.off_policy_mask_threshold = None
    trainer.use_vllm = trainer.aux_loss_enabled = trainer._entropy_bonus_enabled = False
    trainer.max_completion_length = TOKENS
    trainer.current_gradient_accumulation_steps = trainer.accelerator.num_processes = 1
    trainer.accelerator.reduce.side_effect = lambda totals, reduction: totals
    trainer.accelerator.gather.side_effect = lambda values: values
    ids_BT = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids_BT[:, :1],
        "prompt_mask": ids_BT[:, :1],
        "completion_ids": ids_BT,
        "completion_mask": padded.mask_BT.long(),
        "advantages": padded.advantages_BT[:, 0],
        "old_per_token_logps": padded.old_BT,
        "ref_per_token_logps": padded.ref_BT,
        "num_items_in_batch": padded.mask_BT.sum(),
    }
    loss: Tensor = peer.GRPOTrainer._compute_loss(trainer, MagicMock(training=True), inputs)
    return loss


def our_loss(
    padded: Padded, *, loss: PolicyLossKind, aggregation: Aggregation, dual_clip: float | None
) -> Tensor:
    """The objective of a batch of rows of 1 + T tokens, the first of them a prompt."""
    wide = [F.pad(values, (1, 0)) for values in (padded.new_BT, padded.old_BT, padded.ref_BT)]
    mask_N = F.pad(padded.mask_BT, (1, 0)).flatten()
    offsets = torch.arange(0, ROWS * (TOKENS + 1) + 1, TOKENS + 1)
    scale_N = token_scales(
        aggregation,
        mask_N=mask_N,
        offsets=offsets,
        group_B=padded.group_B,
        constant=TOKENS if aggregation == "sequence-sum" else None,
    )
    batch = Batch(
        token_ids_N=torch.zeros(len(mask_N), dtype=torch.int64),
        offsets=offsets,
        loss_mask_N=mask_N,
        advantages_N=F.pad(padded.advantages_BT, (1, 0)).flatten(),
        old_N=wide[1].flatten(),
        ref_N=wide[2].flatten(),
        scale_N=scale_N,
    )
    packed = pack(batch, [[row] for row in range(ROWS)])
    config = GRPOConfig(
        loss=loss,
        # the lower side is open in TRL's cispo
        clip_low=1.0 if loss == "cispo" else CLIP_LOW,
        clip_high=CLIP_HIGH,
        dual_clip=dual_clip,
        aggregation=aggregation,
        kl_coef=BETA,
        correction="none",
    )
    new_n = wide[0].flatten()[packed.flat_index_n]
    return grpo_objective(new_n, torch.zeros_like(new_n), batch, packed, config)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("loss_type", "level", "delta", "loss", "aggregation"),
    [
        ("grpo", "token", None, "ppo", "sequence-mean"),
        ("grpo", "token", 1.5, "ppo", "sequence-mean"),
        ("bnpo", "token", None, "ppo", "token-mean"),
        ("dapo", "token", None, "ppo", "token-mean"),
        ("dr_grpo", "token", None, "ppo", "sequence-sum"),
        ("cispo", "token", None, "cispo", "token-mean"),
        ("grpo", "sequence", None, "gspo", "sequence-mean"),
    ],
)
def test_objective_is_that_of_trl(
    seed: int,
    loss_type: str,
    level: str,
    delta: float | None,
    loss: PolicyLossKind,
    aggregation: Aggregation,
) -> None:
    padded = random_padded(seed)
    theirs = trl_loss(padded, loss_type=loss_type, level=level, delta=delta)
    ours = our_loss(padded, loss=loss, aggregation=aggregation, dual_clip=delta)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    grads = (torch.autograd.grad(value, padded.new_BT)[0] for value in (ours, theirs))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)
