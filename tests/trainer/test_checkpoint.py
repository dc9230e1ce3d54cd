"""Checkpoints: whole or absent, the same at any number of ranks, loud about what does not fit."""

import os
import pickle
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardloop.checkpoint import (
    DRIVER_FILE,
    TRAINER_FILE,
    checkpoint_name,
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    read_metadata,
    save_checkpoint,
    writing,
)
from shardloop.checkpoint.plain import PlainReader
from shardloop.config import OptimConfig, TrainerConfig
from shardloop.errors import CheckpointError
from shardloop.parallel.context import RankContext
from shardloop.parallel.fsdp import full_tensor
from shardloop.trainer import Trainer
from tests.harness import run_ranks
from tests.models import make_folder
from tests.trainer.batches import make_random_batch

EXTRA = {"step": 7, "cursor": {"train": 112}, "why": "umlaut ü"}


def make_trainer(
    context: RankContext, folder: Path, *, dtype: str = "float64", reference: bool = False
) -> Trainer:
    config = TrainerConfig(layout=f"fsdp={context.world_size}", dtype=dtype, row_tokens=16)
    return Trainer(
        context,
        model_dir=folder,
        config=config,
        optim=OptimConfig(weight_decay=0.1),
        reference=reference,
        role="all",
    )


def train(trainer: Trainer, seeds: range) -> None:
    for seed in seeds:
        trainer.forward_backward(make_random_batch(seed=seed), "sft")
        trainer.step(0.01)
        trainer.advance_version()


def whole_state(trainer: Trainer) -> dict[str, Tensor]:
    return {key: full_tensor(value).clone() for key, value in trainer._checkpoint_state().items()}


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


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Writing more fails with OSError, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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


def message(action: Any) -> str | None:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return None


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


def make_fake_run(run: Path) -> None:
    for step in (5, 40, 100, 1_000_000):
        (run / checkpoint_name(step)).mkdir()
        (run / checkpoint_name(step) / TRAINER_FILE).touch()
    (run / checkpoint_name(2_000_000)).mkdir()  # not complete
    (run / ".step-3000000.unfinished").mkdir()


def test_the_latest_checkpoint_is_the_complete_one_of_the_highest_step(tmp_path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None
    make_fake_run(tmp_path)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1000000"


def test_pruning_keeps_the_newest_complete_checkpoints(tmp_path) -> None:
    make_fake_run(tmp_path)
    prune_checkpoints(tmp_path, keep=2)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-000100", "step-1000000", "step-2000000"}


def two_ranks_that_stop_at_different_times(context: RankContext, run: Path) -> tuple[Any, ...]:
    """One rank fails at once, the other goes on writing for a while and makes files."""
    path = run / checkpoint_name(1)

    def slow_save(unfinished: Path, *_: Any) -> None:
        if context.rank == 0:
            raise OSError("rank 0 cannot write")
        time.sleep(0.5)
        (unfinished / "late").mkdir()

    writing.write_shards = slow_save
    text = message(lambda: save_checkpoint(path, {}, version=1, extra={}, group=dist.group.WORLD))
    left = sorted(entry.name for entry in run.iterdir())
    dist.barrier()

    def refusing(path: Path) -> None:
        raise PermissionError(f"not allowed to remove {path.name}")

    writing.remove = refusing
    writing.start_folder = lambda unfinished: unfinished.mkdir()
    stuck = message(lambda: save_checkpoint(path, {}, version=1, extra={}, group=dist.group.WORLD))
    return text, left, stuck


def test_what_a_failed_save_wrote_goes_when_all_ranks_have_stopped_or_is_named(tmp_path) -> None:
    for text, left, stuck in run_ranks(two_ranks_that_stop_at_different_times, 2, tmp_path):
        assert "rank 0 cannot write" in text
        assert left == []
        assert "rank 0 cannot write" in stuck
        assert "remove by hand what is left" in stuck
        assert "not allowed to remove .step-000001.unfinished" in stuck


def save_value(path: Path, value: float, group: dist.ProcessGroup) -> None:
    state = {"w": torch.full((3,), float(value))}
    save_checkpoint(path, state, version=int(value), extra={"step": value}, group=group)


def loaded_value(path: Path | None, group: dist.ProcessGroup) -> float:
    assert path is not None
    state = {"w": torch.zeros(3)}
    restored = load_checkpoint(path, state, group=group)
    assert restored.version == restored.extra["step"] == float(state["w"][0])
    return float(state["w"][0])


class Killed(BaseException):
    """Nothing handles it: what is on the disk stays as it is."""


def failing_from(
    first_bad: int, plain: Callable[..., Any], how: type[BaseException], folder: Path
) -> Callable[..., Any]:
    """`plain`, but from its call number `first_bad` in `folder` on it raises `how`."""
    num_calls = 0

    def call(path: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += Path(path).parent == folder
        if Path(path).parent == folder and num_calls >= first_bad:
            raise how("no")
        return plain(path, *args, **kwargs)

    return call


@pytest.mark.parametrize("how", [OSError, Killed])
@pytest.mark.parametrize("call", ["rename", "rmtree"])
def test_replacing_a_checkpoint_leaves_one_to_load_wherever_it_fails(
    call: str, how: type[BaseException], tmp_path, group, monkeypatch
) -> None:
    """Each call to the file system in turn fails, and with it all later ones."""
    module = os if call == "rename" else shutil
    plain = getattr(module, call)
    path = tmp_path / checkpoint_name(1)
    for first_bad in range(1, 20):
        save_value(path, 1.0, group)
        failing = failing_from(first_bad, plain, how, tmp_path)
        monkeypatch.setattr(module, call, failing)
        done = False
        try:
            save_value(path, 2.0, group)
            done = True
        except (CheckpointError, Killed):
            pass
        monkeypatch.setattr(module, call, plain)
        assert loaded_value(latest_checkpoint(tmp_path), group) in ((2.0,) if done else (1.0, 2.0))
        save_value(path, 3.0, group)
        assert loaded_value(path, group) == 3.0
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
        if done:
            break
    assert 1 < first_bad < 19


def test_a_folder_has_its_name_only_when_every_byte_in_it_was_synced(
    tmp_path, group, monkeypatch
) -> None:
    """Sizes at the time of the sync: what was still in a buffer is not on the disk."""
    path, events = tmp_path / checkpoint_name(1), []
    size_of: dict[int, int] = {}
    fsync, rename = os.fsync, os.rename

    def noting_fsync(descriptor: int) -> None:
        found = os.fstat(descriptor)
        size_of[found.st_ino] = found.st_size
        events.append(found.st_ino)
        fsync(descriptor)

    def noting_rename(source: Any, target: Any) -> None:
        events.append(Path(target).name)
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(os, "rename", noting_rename)
    save_value(path, 1.0, group)
    files = [file.stat() for file in path.iterdir()]
    named = events.index(path.name)
    assert {file.st_ino for file in files} <= set(events[:named])
    assert all(size_of[file.st_ino] == file.st_size > 0 for file in files)
    assert events[named - 1] == path.stat().st_ino, "the names in the folder come last"
    assert events[named + 1] == tmp_path.stat().st_ino


def test_what_killed_saves_and_prunes_left_is_removed_by_the_next(tmp_path, group) -> None:
    def leave() -> None:
        for name in (".step-000001.unfinished", ".step-000002.removed", ".step-000003.old.removed"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "x").touch()
        (tmp_path / "notes").mkdir(exist_ok=True)

    leave()
    for step in (1, 2):
        save_value(tmp_path / checkpoint_name(step), step, group)
    os.rename(tmp_path / checkpoint_name(1), tmp_path / f"{checkpoint_name(1)}.old")
    shutil.copytree(tmp_path / checkpoint_name(2), tmp_path / f"{checkpoint_name(2)}.old")
    leave()
    prune_checkpoints(tmp_path, keep=2)
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert left == ["notes", "step-000001.old", "step-000002"]
    leave()
    save_value(tmp_path / checkpoint_name(3), 3.0, group)
    prune_checkpoints(tmp_path, keep=1)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes", "step-000003"]


def shard(path: Path) -> Path:
    return next(path.glob("*.distcp"))


DAMAGES: dict[str, Any] = {
    "shard cut short": lambda path: shard(path).write_bytes(shard(path).read_bytes()[:100]),
    "shard of zeros": lambda path: shard(path).write_bytes(bytes(shard(path).stat().st_size)),
    "no shard": lambda path: shard(path).unlink(),
    "no metadata": lambda path: (path / ".metadata").unlink(),
    "metadata of zeros": lambda path: (path / ".metadata").write_bytes(bytes(100)),
    "no driver notes": lambda path: (path / DRIVER_FILE).unlink(),
    "other driver notes": lambda path: (path / DRIVER_FILE).write_text("{}"),
    "a list": lambda path: (path / TRAINER_FILE).write_text("[]"),
    "no version": lambda path: (path / TRAINER_FILE).write_text("{}"),
    "no text": lambda path: (path / TRAINER_FILE).write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_in_a_line_that_names_an_older_intact_one(
    damage: str, tmp_path, group
) -> None:
    paths = [tmp_path / checkpoint_name(step) for step in (1, 2, 3)]
    for step, path in enumerate(paths, start=1):
        save_value(path, step, group)
    DAMAGES[damage](paths[2])
    for intact in ("step-000002", "step-000001"):
        text = message(lambda: loaded_value(latest_checkpoint(tmp_path), group))
        assert text is not None and text.startswith(f"{paths[2]}: damaged (")
        assert text.endswith(
            f"; older intact checkpoint: {intact}; delete this folder to go on from it"
        )
        assert "\n" not in text and len(text) < 300 + len(str(paths[2]))
        DAMAGES["shard cut short"](paths[1])
    DAMAGES["no metadata"](paths[0])
    text = message(lambda: loaded_value(paths[2], group))
    assert text is not None and "there is no older intact checkpoint beside it" in text


def test_metadata_can_be_read_without_tensors_or_ranks(tmp_path, group) -> None:
    path = tmp_path / checkpoint_name(1)
    save_value(path, 1.0, group)
    entry = read_metadata(path).state_dict_metadata["w"]
    assert (entry.size, entry.properties.dtype) == (torch.Size([3]), torch.float32)
    shard(path).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"damaged \(__0_0.distcp has 0 bytes of "):
        read_metadata(path)


def test_metadata_that_calls_something_is_refused_and_not_run(tmp_path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "exploded").touch, ())

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match=r"damaged .*which metadata does not need"):
        read_metadata(tmp_path)
    with pytest.raises(CheckpointError):
        PlainReader(tmp_path).read_metadata()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("extra", [{1: "a"}, {"a": (2, 3)}, {"a": [{"b": {None: 1}}]}])
def test_driver_data_that_json_would_change_is_refused_before_anything_is_written(
    extra: Any, tmp_path, group
) -> None:
    path = tmp_path / checkpoint_name(1)
    with pytest.raises(CheckpointError, match="would come back from JSON as"):
        save_checkpoint(path, {"w": torch.ones(3)}, version=1, extra=extra, group=group)
    assert list(tmp_path.iterdir()) == []
