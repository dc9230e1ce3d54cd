"""What a trainer of two ranks promises its callers, bit for bit where it can.

One trip to the ranks serves all tests.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from shardloop import hf
from shardloop.config import GRPOConfig, OptimConfig, TrainerConfig
from shardloop.errors import LayoutError, PolicyDiverged, UsageError
from shardloop.parallel.context import RankContext
from shardloop.parallel.mesh import trainer_axes
from shardloop.rl.batch import Batch
from shardloop.trainer import Trainer
from tests.conftest import SEED
from tests.harness import run_ranks
from tests.models import make_folder
from tests.trainer.batches import make_random_batch

CONFIG = TrainerConfig(layout="fsdp=2", row_tokens=16, rows_per_micro_batch=2)
GRPO = GRPOConfig(kl_coef=0.1)


def make_trainer(context: RankContext, folder: Path) -> Trainer:
    return Trainer(
        context, model_dir=folder, config=CONFIG, optim=OptimConfig(), reference=True, role="all"
    )


def summed(part: Tensor) -> Tensor:
    total = part.clone()
    dist.all_reduce(total)
    return total


def gradients(trainer: Trainer) -> list[Tensor]:
    return [parameter.grad.to_local().clone() for parameter in trainer._policy.parameters()]


def copies(trainer: Trainer) -> dict[str, Tensor]:
    return {name: shard.clone() for name, shard in trainer.shards().items()}


def same(a: Any, b: Any) -> bool:
    pairs = (
        zip(a.values(), b.values(), strict=True) if isinstance(a, dict) else zip(a, b, strict=True)
    )
    return all(torch.equal(x, y) for x, y in pairs)


def facts_of_rank(context: RankContext, folder: Path, out: Path, seed: int) -> dict[str, Any]:
    trainer = make_trainer(context, folder)
    batch = make_random_batch(seed=seed)
    start = copies(trainer)
    old_N, ref_N = (
        summed(trainer.logprobs(batch, policy=policy)) for policy in ("current", "reference")
    )
    batch = dataclasses.replace(batch, old_N=old_N, ref_N=ref_N)
    facts: dict[str, Any] = {"old_N": old_N, "batch": batch}
    facts |= before_first_update(trainer, batch)
    facts |= gradients_of_batches(trainer, batch)
    facts |= refusals(trainer, batch, start)
    facts |= updates(trainer, batch)
    trainer.export(out)
    facts["exported_N"] = summed(trainer.logprobs(batch))
    facts["exported"] = {n: shard.clone() for n, shard in trainer.shards().items()}
    facts["diverged"] = message_after_divergence(trainer, batch)
    return facts


def message_after_divergence(trainer: Trainer, batch: Batch) -> str:
    """What asking for log-probs says when a norm has lost its weight."""
    trainer.shards()["model.norm.weight"].fill_(float("nan"))
    try:
        trainer.logprobs(batch)
    except PolicyDiverged as error:
        return str(error)
    return "log-probs without an error"


def before_first_update(trainer: Trainer, batch: Batch) -> dict[str, Any]:
    """The new log-probs of a pass with gradients, caught on their way, and the metrics."""
    caught_N = torch.zeros_like(batch.old_N)
    score = trainer._score

    def listening(model: Any, packed: Any, temperature: float) -> tuple[Tensor, Tensor]:
        new_n, entropy_n = score(model, packed, temperature)
        caught_N[packed.flat_index_n] = new_n.detach()
        return new_n, entropy_n

    trainer._score = listening  # type: ignore[method-assign]
    metrics = trainer.forward_backward(batch, GRPO)
    trainer._score = score  # type: ignore[method-assign]
    trainer._optimizer.zero_grad()
    return {"new_N": summed(caught_N), "metrics": metrics}


def gradients_of_batches(trainer: Trainer, batch: Batch) -> dict[str, Any]:
    def gradients_of(*batches: Batch) -> list[Tensor]:
        for one in batches:
            trainer.forward_backward(one, GRPO)
        found = gradients(trainer)
        trainer._optimizer.zero_grad()
        return found

    noise_N = torch.randn(len(batch.old_N)).masked_fill(batch.loss_mask_N, 0.0)
    changed = dataclasses.replace(
        batch,
        advantages_N=batch.advantages_N + noise_N,
        old_N=batch.old_N + noise_N,
        ref_N=batch.ref_N + noise_N,
        weights_N=batch.weights_N + noise_N,
    )
    silent = dataclasses.replace(batch, loss_mask_N=torch.zeros_like(batch.loss_mask_N))
    once = gradients_of(batch)
    twice = gradients_of(batch, batch)
    return {
        "repeats": same(once, gradients_of(batch)),
        "mask_holds": same(once, gradients_of(changed)),
        "accumulates": all(
            torch.allclose(2 * a, b, rtol=1e-5) for a, b in zip(once, twice, strict=True)
        ),
        "silent_loss": trainer.forward_backward(silent, GRPO)["loss"],
        "silent_gradients": max(float(g.abs().max()) for g in gradients(trainer) if len(g)),
    }


def refusals(trainer: Trainer, batch: Batch, start: dict[str, Tensor]) -> dict[str, Any]:
    """Messages of what must be refused; the weights stay as they are."""
    trainer._optimizer.zero_grad()
    messages = {}

    def expect(kind: type[Exception], name: str, action: Any) -> None:
        try:
            action()
        except kind as error:
            messages[name] = str(error)

    expect(UsageError, "no gradients", lambda: trainer.step(0.1))
    bare = dataclasses.replace(batch, old_N=None, ref_N=None)
    expect(UsageError, "no values", lambda: trainer.forward_backward(bare, GRPO))
    broken_N = batch.advantages_N.clone()
    broken_N[batch.loss_mask_N.nonzero()[0]] = float("nan")  # a token of one rank only
    trainer.forward_backward(dataclasses.replace(batch, advantages_N=broken_N), GRPO)
    expect(PolicyDiverged, "not finite", lambda: trainer.step(0.1))
    expect(UsageError, "dropped", lambda: trainer.step(0.1))
    return {"messages": messages, "unharmed": same(start, trainer.shards())}


def updates(trainer: Trainer, batch: Batch) -> dict[str, Any]:
    live, before = trainer.shards(), copies(trainer)
    versions = [trainer.version]
    trainer.forward_backward(batch, GRPO)
    report = trainer.step(0.125)
    versions += [trainer.version, trainer.advance_version(), trainer.version]
    moved = torch.cat([(live[name] - before[name]).abs().flatten() for name in live])
    reference_N = summed(trainer.logprobs(batch, policy="reference"))
    return {
        "report": report,
        "versions": versions,
        "median_move": float(moved.median()),
        "largest_move": float(moved.max()),
        "live": same(live, trainer.shards()),
        "frozen": torch.equal(reference_N, batch.ref_N),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export") / "model"


@pytest.fixture(scope="module")
def facts(folder: Path, out: Path) -> list[dict[str, Any]]:
    return run_ranks(facts_of_rank, 2, folder, out, SEED)


def test_old_log_probs_are_bit_equal_to_the_new_before_the_first_update(facts) -> None:
    mask_N = facts[0]["batch"].loss_mask_N
    assert (facts[0]["old_N"][mask_N] < 0.0).all()
    for fact in facts:
        assert torch.equal(fact["old_N"], fact["new_N"])
        assert fact["metrics"]["approx_kl"] == fact["metrics"]["kl"] == 0.0
    assert sum(fact["metrics"]["ratio"] for fact in facts) == pytest.approx(1.0, abs=1e-6)


def test_log_probs_of_all_ranks_add_up_to_those_of_transformers(facts, folder) -> None:
    batch = facts[0]["batch"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    check_log_probs(model, batch, facts[0]["old_N"])


def check_log_probs(model: torch.nn.Module, batch: Batch, scores_N: Tensor) -> None:
    rows = torch.split(batch.token_ids_N, batch.lengths)
    expected = [
        hf.sequence_logprobs(model, row, temperature=batch.temperature).tolist() for row in rows
    ]
    flat_N = torch.tensor([value for row in expected for value in (0.0, *row)])
    flat_N = flat_N.masked_fill(~batch.loss_mask_N, 0.0)
    torch.testing.assert_close(scores_N, flat_N, rtol=1e-6, atol=1e-6)


def test_a_repeated_pass_gives_the_same_gradients_bit_for_bit(facts) -> None:
    assert all(fact["repeats"] for fact in facts)


def test_masked_positions_have_no_effect_at_all(facts) -> None:
    assert all(fact["mask_holds"] for fact in facts)


def test_gradients_of_batches_add_up(facts) -> None:
    assert all(fact["accumulates"] for fact in facts)


def test_a_batch_without_loss_tokens_gives_zeros(facts) -> None:
    assert [fact["silent_loss"] for fact in facts] == [0.0, 0.0]
    assert [fact["silent_gradients"] for fact in facts] == [0.0, 0.0]


def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_update_on_all(facts) -> None:
    for fact in facts:
        assert "gradient norm is nan at version 0" in fact["messages"]["not finite"]
        assert "call forward_backward first" in fact["messages"]["dropped"]
        assert fact["unharmed"]


def test_log_probs_of_a_diverged_policy_are_an_error_of_the_run(facts) -> None:
    for fact in facts:
        assert "current policy are not finite at version 1" in fact["diverged"]
        assert "lower the learning rate" in fact["diverged"]


def test_missing_gradients_and_missing_values_are_refused(facts) -> None:
    for fact in facts:
        assert "call forward_backward first" in fact["messages"]["no gradients"]
        assert "lacks old_N, ref_N" in fact["messages"]["no values"]


def test_the_first_update_of_a_fresh_optimizer_moves_by_the_learning_rate(facts) -> None:
    """Adam's first step is lr times the gradient's sign; a dummy step before would shrink it."""
    for fact in facts:
        assert fact["largest_move"] == pytest.approx(0.125, rel=1e-3)
        assert fact["median_move"] == pytest.approx(0.125, rel=1e-2)


def test_the_gradient_norm_is_the_same_on_every_rank(facts) -> None:
    assert facts[0]["report"] == facts[1]["report"]
    assert facts[0]["report"]["grad_norm"] > 0.0


def test_only_advance_version_counts_a_batch(facts) -> None:
    assert all(fact["versions"] == [0, 0, 1, 1] for fact in facts)


def test_shards_are_the_live_weights(facts) -> None:
    assert all(fact["live"] for fact in facts)


def test_the_reference_does_not_move(facts) -> None:
    assert all(fact["frozen"] for fact in facts)


def test_an_exported_policy_is_the_same_in_transformers(facts, out) -> None:
    model = AutoModelForCausalLM.from_pretrained(out)
    for name, weight in model.named_parameters():
        whole = torch.cat([fact["exported"][name] for fact in facts])
        assert torch.equal(weight, whole), name
    check_log_probs(model, facts[0]["batch"], facts[0]["exported_N"])
    assert hf.load_tokenizer(out).encode("abc")


@pytest.mark.parametrize("spec", ["tp=2,fsdp=2", "engine:tp=2", "fsdp=2,dp=2", "fsdp=0"])
def test_layouts_that_the_trainer_cannot_do_are_refused(spec) -> None:
    with pytest.raises(LayoutError, match="fsdp"):
        trainer_axes(spec)
