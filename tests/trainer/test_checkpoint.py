"""Checkpoints of trainers: the same at any number of ranks, loud about what does not fit."""

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardloop.checkpoint import checkpoint_name, latest_checkpoint
from shardloop.config import OptimConfig, TrainerConfig
from shardloop.parallel.context import RankContext
from shardloop.trainer import Trainer
from tests.harness import run_ranks
from tests.models import make_folder
from tests.trainer.saving import files_of_at_most, make_trainer, message, train, whole_state

EXTRA = {"step": 7, "cursor": {"train": 112}, "why": "umlaut ü"}


def save_and_go_on(context: RankContext, folder: Path, path: Path, keep: bool) -> Any:
    """The state saved after two updates, and the one after a third in the same process."""
    trainer = make_trainer(context, folder, reference=keep)
    train(trainer, range(2))
    trainer.save(path, extra=EXTRA)
    saved = whole_state(trainer)
    train(trainer, range(2, 3))
    return saved, whole_state(trainer)


def load_and_go_on(context: RankContext, folder: Path, path: Path, keep: bool) -> Any:
    torch.manual_seed(99)  # nothing of a trainer depends on torch's generators
    trainer = make_trainer(context, folder, reference=keep)
    train(trainer, range(5, 6))  # a used trainer: everything of its own must be replaced
    extra = trainer.load(path)
    loaded, version = whole_state(trainer), trainer.version
    train(trainer, range(2, 3))
    return extra, version, loaded, whole_state(trainer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # head_dim 2: over three ranks the q and k norms have an empty shard.
    return make_folder(tmp_path_factory.mktemp("model"), head_dim=2)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2)])
def test_weights_moments_and_versions_come_back_at_any_number_of_ranks(
    folder, tmp_path, before, after
) -> None:
    path = tmp_path / checkpoint_name(2)
    keep = before == 2
    saved, uninterrupted = run_ranks(save_and_go_on, before, folder, path, keep)[0]
    for extra, version, loaded, resumed in run_ranks(load_and_go_on, after, folder, path, keep):
        assert (extra, version) == (EXTRA, 2)
        assert loaded.keys() == saved.keys()
        assert any(key.startswith("reference.") for key in loaded) == keep
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)
        assert all(float(loaded[key]) == 2.0 for key in loaded if key.startswith("optim.step."))
        torch.testing.assert_close(resumed, uninterrupted, rtol=1e-9, atol=1e-12)


def test_training_goes_on_bit_for_bit_on_as_many_ranks(folder, tmp_path) -> None:
    """So weights, moments and version are all the state there is: no generator, no schedule."""
    path = tmp_path / checkpoint_name(2)
    by_rank = run_ranks(save_and_go_on, 2, folder, path, False)
    for (_, uninterrupted), (*_, resumed) in zip(
        by_rank, run_ranks(load_and_go_on, 2, folder, path, False), strict=True
    ):
        assert all(torch.equal(resumed[key], uninterrupted[key]) for key in uninterrupted)


def trainer_beside_engine(context: RankContext, folder: Path, path: Path) -> bool | None:
    """Ranks 1 and 2 train; rank 0, which a library might take for the coordinator, does not."""
    if not context.has("trainer"):
        return None
    trainer = Trainer(
        context,
        model_dir=folder,
        config=TrainerConfig(layout="fsdp=2"),
        optim=OptimConfig(),
        reference=False,
    )
    train(trainer, range(1))
    before = whole_state(trainer)
    trainer.save(path, background=True)
    train(trainer, range(1, 2))
    trainer.load(path)
    trainer.export(path.with_name("export"))
    return all(torch.equal(whole_state(trainer)[key], before[key]) for key in before)


def test_a_trainer_need_not_live_on_rank_0(folder, tmp_path) -> None:
    roles = {"engine": (0,), "trainer": (1, 2)}
    path = tmp_path / checkpoint_name(1)
    answers = run_ranks(trainer_beside_engine, 3, folder, path, roles=roles)
    assert answers == [None, True, True]
    assert (tmp_path / "export" / "model.safetensors").is_file()


def faults_of_rank(context: RankContext, folder: Path, run: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    trainer = make_trainer(context, folder)
    fresh, used, second = (run / checkpoint_name(step) for step in (0, 1, 2))
    trainer.save(fresh)
    facts["fresh steps"] = {float(s["step"]) for s in trainer._optimizer.state.values()}
    train(trainer, range(1))
    expected = whole_state(trainer)
    trainer.load(fresh)
    train(trainer, range(1))
    actual = whole_state(trainer)
    facts["fresh replays"] = all(torch.equal(actual[key], expected[key]) for key in expected)
    trainer.save(used)

    limit = 2000 if context.rank == 1 else resource.RLIM_INFINITY
    with files_of_at_most(limit):
        facts["full disk"] = message(lambda: trainer.save(second))
    facts["left over"] = sorted(path.name for path in run.iterdir())
    facts["latest"] = latest_checkpoint(run)
    dist.barrier()  # the next save starts its folder at once
    facts["unwritable extra"] = message(lambda: trainer.save(second, extra={"x": object()}))
    facts["earlier loads"] = message(lambda: trainer.load(used))
    dist.barrier()

    if context.rank == 0:  # what a killed save leaves behind
        shutil.copytree(used, run / f".{checkpoint_name(2)}.unfinished", dirs_exist_ok=True)
    dist.barrier()
    facts["latest beside a torso"] = latest_checkpoint(run)
    facts["second try"] = message(lambda: trainer.save(second))
    facts["again"] = message(lambda: trainer.save(second))
    facts["left over at last"] = sorted(path.name for path in run.iterdir())

    before = whole_state(trainer)
    other = make_trainer(context, folder, dtype="float32", reference=True)
    facts["does not fit"] = message(lambda: other.load(used))
    other.save(run / checkpoint_name(3))
    facts["does not fit back"] = message(lambda: trainer.load(run / checkpoint_name(3)))
    facts["absent"] = message(lambda: trainer.load(run / "nowhere"))
    dist.barrier()
    if context.rank == 0:
        (used / ".metadata").write_bytes(b"x")
        (fresh / "__1_0.distcp").write_bytes(b"")
    dist.barrier()
    facts["no metadata"] = message(lambda: trainer.load(used))
    after = whole_state(trainer)
    facts["unharmed"] = all(torch.equal(after[key], before[key]) for key in before)
    facts["no tensors"] = message(lambda: trainer.load(fresh))
    return facts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def facts(folder: Path, run: Path) -> list[dict[str, Any]]:
    return run_ranks(faults_of_rank, 2, folder, run)


def test_saving_a_fresh_optimizer_does_not_advance_it(facts) -> None:
    assert all(fact["fresh steps"] == {0.0} for fact in facts)


def test_a_fresh_checkpoint_replays_the_first_update_bit_for_bit(facts) -> None:
    assert all(fact["fresh replays"] for fact in facts)


def test_a_full_disk_on_one_rank_is_an_error_on_all_and_leaves_no_trace(facts, run) -> None:
    for fact in facts:
        assert str(run / checkpoint_name(2)) in fact["full disk"]
        assert "File too large" in fact["full disk"]
        assert "earlier checkpoints are intact" in fact["full disk"]
        assert fact["left over"] == [checkpoint_name(0), checkpoint_name(1)]
        assert fact["latest"] == run / checkpoint_name(1)
        assert fact["earlier loads"] is None


def test_driver_data_that_is_no_json_stops_the_save_on_all_ranks(facts) -> None:
    assert all("not JSON serializable" in fact["unwritable extra"] for fact in facts)


def test_a_save_that_was_killed_is_ignored_and_then_replaced(facts, run) -> None:
    for fact in facts:
        assert fact["latest beside a torso"] == run / checkpoint_name(1)
        assert fact["second try"] is fact["again"] is None
        assert fact["left over at last"] == [checkpoint_name(step) for step in range(3)]


def test_each_kind_of_difference_is_counted_with_its_setting_and_nothing_is_loaded(facts) -> None:
    for fact in facts:
        there, back = fact["does not fit"], fact["does not fit back"]
        assert "24 missing in the checkpoint: reference.model.embed_tokens.weight, " in there
        assert (
            "of another dtype: model.model.embed_tokens.weight is torch.float64 there but" in there
        )
        assert "set trainer.dtype to float64, as it was saved" in there
        assert "it was saved without a reference policy: set grpo.kl-coef to 0" in there
        assert "24 extra in the checkpoint: reference.model.embed_tokens.weight, " in back
        assert "and 21 more" in back
        assert "set trainer.dtype to float32, as it was saved" in back
        assert "it was saved with a reference policy: set grpo.kl-coef above 0" in back
        assert len(there) < 1500
        assert fact["unharmed"]


def test_absent_and_damaged_checkpoints_are_refused_on_all_ranks(facts, run) -> None:
    for fact in facts:
        assert f"{run / 'nowhere'}: no complete checkpoint there" in fact["absent"]
        assert "damaged (UnpicklingError" in fact["no metadata"]
        assert str(run / checkpoint_name(0)) in fact["no tensors"]
        assert "damaged (__1_0.distcp has 0 bytes of " in fact["no tensors"]
