"""Our mathematics against verl's, on the same tensors; needs verl (`make test-all` installs it).

verl imports ray for its own orchestration, which none of these functions uses; an empty module
stands in for it while verl is imported.
"""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardloop.config import Aggregation, CorrectionKind, CorrectionMode, KLEstimator
from shardloop.rl.advantages import (
    grpo_advantages,
    reinforce_pp_advantages,
    rloo_advantages,
    whiten,
)
from shardloop.rl.aggregation import token_scales
from shardloop.rl.correction import correction_weights
from shardloop.rl.gae import gae_advantages
from shardloop.rl.kl import KL_ESTIMATORS
from shardloop.rl.losses import TokenLoss, cispo_loss, gspo_loss, ppo_clip_loss
from tests.peers.padded import ROWS, TOKENS, Padded, random_padded

pytestmark = [pytest.mark.optional, pytest.mark.filterwarnings("ignore")]

CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
MODES: dict[str, Aggregation] = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "sequence-mean",
    "seq-mean-token-sum-norm": "sequence-sum",
}
seeds = pytest.mark.parametrize("seed", range(3))


@pytest.fixture(scope="module")
def verl() -> Iterator[SimpleNamespace]:
    ray = ModuleType("ray")
    ray.ObjectRef = object  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        if "ray" not in sys.modules:
            patch.setitem(sys.modules, "ray", ray)
        pytest.importorskip("verl")
        from verl.trainer.ppo import core_algos, rollout_corr_helper
        from verl.workers.config import ActorConfig

    yield SimpleNamespace(algos=core_algos, correction=rollout_corr_helper, config=ActorConfig)


def scale_BT(padded: Padded, kind: Aggregation) -> Tensor:
    scale_N = token_scales(
        kind,
        mask_N=padded.mask_BT.flatten(),
        offsets=padded.offsets,
        group_B=padded.group_B,
        constant=TOKENS if kind == "sequence-sum" else None,
    )
    return scale_N.view(ROWS, TOKENS)


def our_loss(padded: Padded, name: str, kind: Aggregation, weights_BT: Tensor) -> Tensor:
    mask_BT = padded.mask_BT
    tokens = (padded.new_BT[mask_BT], padded.old_BT[mask_BT], padded.advantages_BT[mask_BT])
    loss: TokenLoss
    if name == "gspo":
        loss = gspo_loss(*tokens, row_n=padded.row_n, **CLIPS)
    elif name == "cispo":
        loss = cispo_loss(*tokens, **CLIPS)
    else:
        loss = ppo_clip_loss(*tokens, **CLIPS, dual_clip=3.0)
    return (scale_BT(padded, kind)[mask_BT] * weights_BT[mask_BT] * loss.loss_n).sum()


@seeds
@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo"])
@pytest.mark.parametrize("mode", list(MODES))
def test_policy_losses_and_gradients_are_those_of_verl(
    verl: Any, seed: int, name: str, mode: str
) -> None:
    padded = random_padded(seed)
    weights_BT = (padded.old_BT - padded.engine_BT).exp().clamp(max=2.0)
    config = verl.config(
        strategy="fsdp",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=CLIPS["clip_low"],
        clip_ratio_high=CLIPS["clip_high"],
        clip_ratio_c=3.0,
    )
    theirs, _ = verl.algos.get_policy_loss_fn(name)(
        old_log_prob=padded.old_BT,
        log_prob=padded.new_BT,
        advantages=padded.advantages_BT,
        response_mask=padded.mask_BT.double(),
        loss_agg_mode=mode,
        config=config,
        rollout_is_weights=weights_BT,
    )
    ours = our_loss(padded, name, MODES[mode], weights_BT)
    # verl adds 1e-8 to the tokens of a row
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)
    grads = (torch.autograd.grad(loss, padded.new_BT)[0] for loss in (ours, theirs))
    torch.testing.assert_close(*grads, rtol=1e-7, atol=1e-9)


@seeds
@pytest.mark.parametrize("constant", [1, 5])
def test_summed_sequences_are_those_of_verl(verl: Any, seed: int, constant: int) -> None:
    """verl divides by the number of rows first and, with a scale factor, by that too."""
    padded = random_padded(seed)
    mode = "seq-mean-token-sum" if constant == 1 else "seq-mean-token-sum-norm"
    theirs = verl.algos.agg_loss(
        padded.new_BT, padded.mask_BT.double(), mode, loss_scale_factor=constant
    )
    scale_N = token_scales(
        "sequence-sum",
        mask_N=padded.mask_BT.flatten(),
        offsets=padded.offsets,
        group_B=padded.group_B,
        constant=constant,
    )
    torch.testing.assert_close((scale_N * padded.new_BT.flatten()).sum(), theirs)


def outcome(seed: int) -> tuple[Tensor, Tensor, Tensor, np.ndarray]:
    """Rewards [P, G], the same on the last token of each row [B, T], the mask, prompt numbers."""
    padded = random_padded(seed)
    rewards_B = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rewards_BT = torch.zeros(ROWS, TOKENS, dtype=torch.float64)
    rewards_BT[:, 0] = rewards_B
    return rewards_B.view(-1, 2), rewards_BT, padded.mask_BT, padded.group_B.numpy()


@seeds
@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce++"])
def test_advantages_are_those_of_verl(verl: Any, seed: int, kind: str) -> None:
    rewards_PG, rewards_BT, mask_BT, index_B = outcome(seed)
    arguments = {"token_level_rewards": rewards_BT, "response_mask": mask_BT.double()}
    if kind == "rloo":
        ours_PG = rloo_advantages(rewards_PG)
        theirs_BT, _ = verl.algos.compute_rloo_outcome_advantage(**arguments, index=index_B)
    elif kind == "reinforce++":
        ours_PG = reinforce_pp_advantages(rewards_PG, num_tokens_PG=mask_BT.sum(1).view(-1, 2))
        theirs_BT, _ = verl.algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
            **arguments, index=index_B
        )
    else:
        ours_PG = grpo_advantages(rewards_PG, std="sample" if kind == "grpo" else "none")
        theirs_BT, _ = verl.algos.compute_grpo_outcome_advantage(
            **arguments, index=index_B, norm_adv_by_std_in_grpo=kind == "grpo"
        )
    # both keep std away from 0, by 1e-6 here and by 1e-8 on the variance there
    expected_BT = ours_PG.flatten()[:, None] * mask_BT
    torch.testing.assert_close(theirs_BT, expected_BT, rtol=2e-5, atol=1e-9)


@seeds
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95)])
def test_generalised_advantages_are_those_of_verl_before_it_whitens(
    verl: Any, seed: int, gamma: float, lam: float
) -> None:
    padded = random_padded(seed)
    rewards_BT, values_BT, mask_BT = padded.ref_BT, padded.engine_BT, padded.mask_BT
    theirs_BT, returns_BT = verl.algos.compute_gae_advantage_return(
        rewards_BT, values_BT, mask_BT.double(), gamma, lam
    )
    ours = gae_advantages(
        rewards_BT.flatten(),
        values_BT.flatten(),
        mask_N=mask_BT.flatten(),
        offsets=padded.offsets,
        gamma=gamma,
        lam=lam,
    )
    chosen = mask_BT.flatten()
    torch.testing.assert_close(ours.returns_N[chosen], returns_BT[mask_BT])
    white_n = whiten(ours.advantages_N[chosen], num_tokens=torch.ones(int(chosen.sum())))
    torch.testing.assert_close(white_n, theirs_BT[mask_BT], rtol=2e-6, atol=1e-9)


@seeds
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators_are_those_of_verl(verl: Any, seed: int, kind: KLEstimator) -> None:
    padded = random_padded(seed)
    theirs_BT = verl.algos.kl_penalty(padded.new_BT, padded.ref_BT, kind)
    ours_BT = KL_ESTIMATORS[kind](padded.new_BT, padded.ref_BT)
    torch.testing.assert_close(ours_BT, theirs_BT)
    grads = (torch.autograd.grad(kl.sum(), padded.new_BT)[0] for kl in (ours_BT, theirs_BT))
    torch.testing.assert_close(*grads)


@seeds
@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize(("mode", "bounds"), [("truncate", 1.5), ("mask", "0.6_1.5")])
def test_correction_weights_are_those_of_verl(
    verl: Any, seed: int, kind: CorrectionKind, mode: CorrectionMode, bounds: str | float
) -> None:
    padded = random_padded(seed)
    theirs_BT, _ = verl.correction.compute_rollout_correction_weights(
        padded.old_BT - padded.engine_BT,
        padded.mask_BT.double(),
        rollout_is=kind,
        rollout_is_threshold=bounds,
    )
    ours = correction_weights(
        padded.old_BT.flatten(),
        padded.engine_BT.flatten(),
        kind=kind,
        mode=mode,
        cap=1.5,
        floor=0.6 if mode == "mask" else 0.0,
        mask_N=padded.mask_BT.flatten(),
        offsets=padded.offsets,
    )
    torch.testing.assert_close(ours.weights_N, theirs_BT.flatten())
