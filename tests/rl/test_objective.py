"""The objective of a batch: a sum that no split changes, and tokens that must not matter."""

import dataclasses

import pytest
import torch
from torch import Tensor

from shardloop.config import GRPOConfig
from shardloop.errors import UsageError
from shardloop.objective import check_batch, grpo_objective
from shardloop.rl.aggregation import token_scales
from shardloop.rl.batch import Batch
from shardloop.rl.kl import KL_ESTIMATORS, kl_k3
from shardloop.rl.packing import pack
from tests.trainer.batches import make_random_batch

LOSSES = [
    GRPOConfig(),
    GRPOConfig(loss="ppo", dual_clip=1.5, correction="none"),
    GRPOConfig(loss="gspo", kl_coef=0.3, kl_estimator="k2", entropy_coef=0.1),
    GRPOConfig(loss="cispo", kl_coef=0.3, kl_estimator="k1"),
]
KINDS = ["token-mean", "sequence-mean", "prompt-mean", "sequence-sum"]


def with_scales(batch: Batch, kind: str, *, per_prompt: int = 1) -> Batch:
    scale_N = token_scales(
        kind,  # type: ignore[arg-type]
        mask_N=batch.loss_mask_N,
        offsets=batch.offsets,
        group_B=torch.arange(len(batch.lengths)) // per_prompt,
        constant=5 if kind == "sequence-sum" else None,
    )
    return dataclasses.replace(batch, scale_N=scale_N)


def evaluate(
    batch: Batch, new_N: Tensor, config: GRPOConfig, micro_batches: list[list[list[int]]]
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
    """Objective, parts and both gradients, summed over micro-batches of rows."""
    new_N = new_N.clone().requires_grad_()
    entropy_N = torch.linspace(0.1, 2.0, len(new_N), dtype=new_N.dtype).requires_grad_()
    objective, parts = torch.zeros((), dtype=new_N.dtype), dict[str, Tensor]()
    for rows in micro_batches:
        packed = pack(batch, rows)
        index_n = packed.flat_index_n
        part, more = grpo_objective(new_N[index_n], entropy_N[index_n], batch, packed, config)
        objective = objective + part
        parts = {name: parts.get(name, torch.zeros(())) + value for name, value in more.items()}
    grads = torch.autograd.grad(objective, (new_N, entropy_N), materialize_grads=True)
    return objective.detach(), parts, *grads


def whole(batch: Batch) -> list[list[list[int]]]:
    return [[[index] for index in range(len(batch.lengths))]]


@pytest.mark.parametrize("config", LOSSES, ids=lambda config: config.loss)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "micro_batches",
    [
        [[[0, 1, 2]], [[3], [4], [5, 6]]],
        [[[index]] for index in range(7)],
        [[[6, 5, 4, 3, 2, 1]], [], [[0]]],
    ],
)
def test_parts_and_gradient_are_the_same_for_any_split(
    micro_batches: list[list[list[int]]], kind: str, config: GRPOConfig
) -> None:
    batch = with_scales(make_random_batch(temperature=1.0), kind, per_prompt=2)
    new_N = batch.old_N + 0.2 * batch.advantages_N
    expected = evaluate(batch, new_N, config, whole(batch))
    split = evaluate(batch, new_N, config, micro_batches)
    torch.testing.assert_close(split, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("seed", range(3))
def test_objective_is_the_slow_sum(seed: int) -> None:
    batch = make_random_batch(seed=seed, temperature=1.0)
    new_N = batch.old_N + 0.3 * torch.sin(torch.arange(len(batch.old_N), dtype=torch.float64))
    config = GRPOConfig(kl_coef=0.3, entropy_coef=0.1, correction="token")
    objective, parts, _, _ = evaluate(batch, new_N, config, whole(batch))
    sums = dict.fromkeys(("policy", "kl", "entropy", "clipped", "ratio", "approx_kl"), 0.0)
    entropy_N = torch.linspace(0.1, 2.0, len(new_N), dtype=new_N.dtype)
    for token in batch.loss_mask_N.nonzero().flatten().tolist():
        ratio = (new_N[token] - batch.old_N[token]).exp().item()
        advantage = batch.advantages_N[token].item()
        free, clipped = ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage
        sums["policy"] -= min(free, clipped) * batch.weights_N[token].item()
        sums["clipped"] += clipped < free
        sums["ratio"] += ratio
        sums["approx_kl"] += kl_k3(batch.old_N[token], new_N[token]).item()
        sums["kl"] += kl_k3(new_N[token], batch.ref_N[token]).item()
        sums["entropy"] += entropy_N[token].item()
    mean = {name: value / batch.num_loss_tokens for name, value in sums.items()}
    total = mean["policy"] + 0.3 * mean["kl"] - 0.1 * mean["entropy"]
    assert objective.item() == pytest.approx(total, rel=1e-12)
    assert {name: part.item() for name, part in parts.items()} == pytest.approx(
        {
            "policy_loss": mean["policy"],
            "kl": mean["kl"],
            "clip_fraction": mean["clipped"],
            "ratio": mean["ratio"],
            "approx_kl": mean["approx_kl"],
        },
        rel=1e-12,
    )
    assert 0.0 < mean["clipped"] < 1.0, "some tokens are clipped, and some are not"


def test_no_scales_mean_the_mean_over_tokens() -> None:
    batch = make_random_batch(temperature=1.0)
    new_N = batch.old_N + 0.1
    bare = evaluate(batch, new_N, GRPOConfig(), whole(batch))
    scaled = evaluate(with_scales(batch, "token-mean"), new_N, GRPOConfig(), whole(batch))
    torch.testing.assert_close(bare, scaled, rtol=1e-14, atol=0.0)


def rows_of_1_and_3(copies: int = 1) -> Batch:
    """A prompt of one token, then 1 and 3 tokens of advantages +1 and -1; ratio 1."""
    mask_N = torch.tensor([False, True, False, True, True, True] * copies)
    advantages_N = torch.tensor([0.0, 1.0, 0.0, -1.0, -1.0, -1.0] * copies, dtype=torch.float64)
    return Batch(
        token_ids_N=torch.zeros(6 * copies, dtype=torch.int64),
        offsets=torch.tensor([0, *[2, 4] * copies]).cumsum(0),
        loss_mask_N=mask_N,
        advantages_N=advantages_N,
        old_N=torch.zeros(6 * copies, dtype=torch.float64),
    )


@pytest.mark.parametrize("micro_batches", [[[[0], [1]]], [[[0]], [[1]]], [[[0, 1]], []]])
def test_token_mean_of_rows_of_lengths_1_and_3_is_half(
    micro_batches: list[list[list[int]]],
) -> None:
    batch, config = rows_of_1_and_3(), GRPOConfig(correction="none")
    assert evaluate(batch, batch.old_N, config, micro_batches)[0].item() == 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_a_repeated_batch_has_the_same_loss(kind: str) -> None:
    config = GRPOConfig(correction="none")
    once, twice = (with_scales(rows_of_1_and_3(copies), kind) for copies in (1, 2))
    losses = [evaluate(batch, batch.old_N, config, whole(batch))[0] for batch in (once, twice)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-14, atol=1e-16)


def test_a_rank_without_tokens_adds_nothing_to_a_mean() -> None:
    batch = make_random_batch(temperature=1.0)
    new_N = batch.old_N + 0.1
    config = GRPOConfig(kl_coef=0.3)
    # row 1 has no loss token, and the last rank has no row
    _, alone, grad_N, _ = evaluate(batch, new_N, config, [[[1]], []])
    assert all(part.item() == 0.0 for part in alone.values())
    assert not grad_N.any()
    _, parts, _, _ = evaluate(batch, new_N, config, [[[0, 2]], [[1]], [[3, 4, 5, 6]], []])
    assert parts["ratio"].item() == pytest.approx(torch.tensor(0.1).exp().item())
    expected = kl_k3(new_N, batch.ref_N)[batch.loss_mask_N].mean()
    torch.testing.assert_close(parts["kl"], expected)


@pytest.mark.parametrize("config", LOSSES, ids=lambda config: config.loss)
def test_a_batch_that_is_masked_out_costs_nothing(config: GRPOConfig) -> None:
    batch = make_random_batch(temperature=1.0)
    nothing = dataclasses.replace(batch, loss_mask_N=torch.zeros_like(batch.loss_mask_N))
    for kind in KINDS:
        silent = with_scales(nothing, kind)
        objective, parts, grad_N, _ = evaluate(silent, batch.old_N, config, whole(batch))
        assert objective.item() == 0.0
        assert not grad_N.any()
        assert all(part.item() == 0.0 for part in parts.values())


@pytest.mark.parametrize("config", LOSSES, ids=lambda config: config.loss)
@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_token_changes_nothing_bit_for_bit(kind: str, config: GRPOConfig) -> None:
    batch = with_scales(make_random_batch(temperature=1.0), kind)
    mask_N = batch.loss_mask_N
    clean = evaluate(batch, batch.old_N + 0.1, config, whole(batch))
    names = ("advantages_N", "behave_N", "old_N", "ref_N", "weights_N", "scale_N")
    poison = {name: getattr(batch, name).masked_fill(~mask_N, torch.nan) for name in names}
    poisoned = dataclasses.replace(batch, **poison)
    changed_N = (batch.old_N + 0.1).masked_fill(~mask_N, -6.0)
    dirty = evaluate(poisoned, changed_N, config, whole(batch))
    assert dirty[1] == clean[1]
    assert torch.equal(dirty[0], clean[0])
    assert torch.equal(dirty[2], clean[2])
    assert (dirty[2][~mask_N] == 0.0).all()
    assert (dirty[2][mask_N] != 0.0).any()


def test_ratio_is_one_and_kl_zero_before_the_first_update() -> None:
    batch = make_random_batch(temperature=1.0)
    batch = dataclasses.replace(batch, ref_N=batch.old_N)
    _, parts, _, _ = evaluate(batch, batch.old_N, GRPOConfig(kl_coef=0.3), whole(batch))
    names = ("approx_kl", "clip_fraction", "kl")
    assert {name: parts[name].item() for name in names} == dict.fromkeys(names, 0.0)
    assert parts["ratio"].item() == pytest.approx(1.0, abs=1e-15)


def test_weights_and_scales_are_constants() -> None:
    batch = with_scales(make_random_batch(temperature=1.0), "sequence-mean")
    clean = evaluate(batch, batch.old_N + 0.1, GRPOConfig(), whole(batch))
    _, _, grad_N, _ = clean
    halved = dataclasses.replace(batch, weights_N=batch.weights_N / 2)
    _, parts, half_N, _ = evaluate(halved, batch.old_N + 0.1, GRPOConfig(), whole(batch))
    torch.testing.assert_close(half_N, grad_N / 2)
    torch.testing.assert_close(parts["policy_loss"], clean[1]["policy_loss"] / 2)
    assert torch.equal(parts["ratio"], clean[1]["ratio"]), "metrics are not weighted"


@pytest.mark.parametrize("kind", KINDS)
def test_an_entropy_bonus_has_the_gradient_of_its_scales(kind: str) -> None:
    batch = with_scales(make_random_batch(temperature=1.0), kind)
    config = GRPOConfig(entropy_coef=0.1)
    _, _, _, grad_N = evaluate(batch, batch.old_N, config, whole(batch))
    torch.testing.assert_close(grad_N, -0.1 * batch.scale_N)
    _, _, _, none_N = evaluate(batch, batch.old_N, GRPOConfig(), whole(batch))
    assert not none_N.any()


@pytest.mark.parametrize("estimator", list(KL_ESTIMATORS))
def test_a_kl_in_the_reward_is_not_in_the_loss(estimator: str) -> None:
    batch = make_random_batch(temperature=1.0)
    new_N = batch.old_N + 0.1
    plain = evaluate(batch, new_N, GRPOConfig(), whole(batch))
    arguments = {"kl_coef": 0.3, "kl_estimator": estimator}
    in_reward = GRPOConfig(**arguments, kl_in="reward")
    without = dataclasses.replace(batch, ref_N=None)
    check_batch(without, in_reward)
    assert torch.equal(evaluate(without, new_N, in_reward, whole(batch))[2], plain[2])
    in_loss = evaluate(batch, new_N, GRPOConfig(**arguments), whole(batch))
    leaf_N = new_N.clone().requires_grad_()
    kl = KL_ESTIMATORS[estimator](leaf_N, batch.ref_N)[batch.loss_mask_N].mean()  # type: ignore[index]
    torch.testing.assert_close(in_loss[2] - plain[2], torch.autograd.grad(0.3 * kl, leaf_N)[0])


def test_a_batch_that_lacks_what_the_loss_needs_is_refused() -> None:
    batch = make_random_batch(temperature=1.0)
    for name, config in (
        ("ref_N", GRPOConfig(kl_coef=0.1)),
        ("weights_N", GRPOConfig(correction="token")),
        ("scale_N", GRPOConfig(aggregation="sequence-mean")),
        ("old_N", GRPOConfig()),
    ):
        with pytest.raises(UsageError, match=f"lacks {name}.*dataclasses.replace"):
            check_batch(dataclasses.replace(batch, **{name: None}), config)
