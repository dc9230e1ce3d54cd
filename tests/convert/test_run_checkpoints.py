"""A run's own checkpoints, saved by several ranks, and a trainer's exports: streamed, the same."""

from pathlib import Path

import pytest
import torch

from shardloop import hf
from shardloop.config import OptimConfig, TrainerConfig
from shardloop.convert import open_checkpoint, open_source
from shardloop.errors import CheckpointError
from shardloop.hf import weights as weights_module
from shardloop.parallel.context import RankContext
from shardloop.trainer import Trainer
from tests.convert.models import read_folder, same
from tests.convert.test_convert import converted
from tests.harness import run_ranks
from tests.models import make_folder
from tests.trainer.batches import make_random_batch

LAYOUTS = {"step-000001": "fsdp=4", "step-000002": "fsdp=2,tp=2"}


def make_trainer(context: RankContext, folder: Path, layout: str) -> Trainer:
    return Trainer(
        context,
        model_dir=folder,
        config=TrainerConfig(layout=layout, row_tokens=16),
        optim=OptimConfig(),
        reference=True,
        role="all",
    )


def save_and_export(context: RankContext, folder: Path, run: Path) -> None:
    for name, layout in LAYOUTS.items():
        trainer = make_trainer(context, folder, layout)
        trainer.forward_backward(make_random_batch(seed=0), "sft")
        trainer.step(0.01)
        trainer.advance_version()
        trainer.save(run / name)
        trainer.finish_save()
        trainer.export(run / f"{name} exported")


def test_what_four_ranks_saved_becomes_what_they_exported(tmp_path) -> None:
    folder = make_folder(tmp_path / "model", num_hidden_layers=3)
    run_ranks(save_and_export, 4, folder, tmp_path, timeout_s=200)
    config = hf.load_config(folder)
    for name in LAYOUTS:
        reader = open_checkpoint(tmp_path / name)
        assert reader.notes["ranks that saved it"] == "4"
        assert reader.notes["version"] == "1"
        assert "of optim" in reader.notes["also there"]
        exported = read_folder(tmp_path / f"{name} exported")
        assert not same(exported, read_folder(folder)), "the policy, not the reference, was saved"
        back = tmp_path / f"{name} converted"
        converted(tmp_path / name, "hf", back, config=config, folder=folder, max_shard_bytes=9000)
        assert same(read_folder(back), exported)
        assert len(list(back.glob("*.safetensors"))) > 2
        ids = torch.arange(12)[None]
        ours, theirs = (
            hf.load_model(path, dtype=torch.float32)(ids).logits
            for path in (back, tmp_path / f"{name} exported")
        )
        assert torch.equal(ours, theirs)
        converted(tmp_path / name, "megatron:tp=2", tmp_path / f"{name} ranks", config=config)
        assert open_source(tmp_path / f"{name} ranks").reader.num_ranks == 2


def fail_to_export(context: RankContext, folder: Path, out: Path) -> str:
    trainer = make_trainer(context, folder, "fsdp=2")
    real = weights_module.write_weights

    def fail_at_the_third(folder_, specs, read, **rest):
        calls = []

        def read_or_fail(name):
            calls.append(name)
            if len(calls) == 3:
                raise OSError(28, "No space left on device")
            return read(name)

        return real(folder_, specs, read_or_fail, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_module, "write_weights", fail_at_the_third)
        with pytest.raises(CheckpointError) as caught:
            trainer.export(out)
    trainer.export(out)  # all ranks are at the same place again
    return str(caught.value)


def test_an_export_that_fails_on_one_rank_fails_on_all_and_leaves_none_waiting(tmp_path) -> None:
    folder = make_folder(tmp_path / "model")
    texts = run_ranks(fail_to_export, 2, folder, tmp_path / "out", timeout_s=60)
    assert all("No space left" in text for text in texts), texts
    assert same(read_folder(tmp_path / "out"), read_folder(folder))
