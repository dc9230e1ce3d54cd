"""What leaves a trainer cut both ways (shards, checkpoints, exports, updates of an engine) is what
leaves one that is not."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from shardloop.config import GRPOConfig, OptimConfig, TrainerConfig
from shardloop.layout import make_layout
from shardloop.parallel.context import RankContext
from shardloop.parallel.fsdp import full_tensor
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import verify
from shardloop.trainer import Trainer
from shardloop.weight_sync import WeightSync
from tests.harness import run_ranks
from tests.models import make_folder
from tests.trainer.batches import make_random_batch
from tests.transport.live import cut, empty


def make_trainer(context: RankContext, folder: Path, layout: str, **settings: Any) -> Trainer:
    return Trainer(
        context,
        model_dir=folder,
        config=TrainerConfig(layout=layout, row_tokens=16, **settings),
        optim=OptimConfig(weight_decay=0.1),
        reference=False,
        role="all",
    )


def train(trainer: Trainer, seeds: range) -> None:
    for seed in seeds:
        trainer.forward_backward(make_random_batch(seed=seed), "sft")
        trainer.step(0.01)
        trainer.advance_version()


def whole_state(trainer: Trainer) -> dict[str, Tensor]:
    return {key: full_tensor(value).clone() for key, value in trainer._checkpoint_state().items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"), tied=False)


FSDP, TP, BOTH = "fsdp=4", "dp=2,tp=2", "fsdp=2,tp=2"
STOPS = (FSDP, TP, FSDP, BOTH, TP, BOTH, FSDP)
"""Each of the three is followed once by each other."""


def passed_on(context: RankContext, folder: Path, run: Path) -> list[dict[str, Any]]:
    """At each stop: what was loaded from the stop before, and what is saved and exported."""
    stops = []
    for number, layout in enumerate(STOPS):
        trainer = make_trainer(context, folder, layout)
        train(trainer, range(5, 6))  # a used trainer: everything of its own must be replaced
        if number:
            trainer.load(run / f"step-00000{number}")
        loaded = whole_state(trainer)
        trainer.export(run / f"export {number}")
        train(trainer, range(number, number + 1))
        trainer.save(run / f"step-00000{number + 1}", background=number % 2 == 0)
        trainer.finish_save()
        stops.append({"loaded": loaded, "saved": whole_state(trainer)})
    return stops


def test_checkpoints_and_exports_are_bit_for_bit_the_same_under_any_layout(
    folder, tmp_path
) -> None:
    by_rank = run_ranks(passed_on, 4, folder, tmp_path, timeout_s=240)
    for stops in by_rank:
        for before, after in pairwise(stops):
            saved, loaded = before["saved"], after["loaded"]
            assert loaded.keys() == saved.keys()
            assert [key for key in saved if not torch.equal(loaded[key], saved[key])] == []
    for states in run_ranks(loaded_by_fewer, 2, folder, tmp_path):
        for stop, loaded in zip(by_rank[0][-3:], states, strict=True):
            assert all(torch.equal(loaded[key], stop["saved"][key]) for key in stop["saved"])
    for number, stop in enumerate(by_rank[0]):
        exported = load_file(tmp_path / f"export {number}" / "model.safetensors")
        assert {f"model.{name}" for name in exported} < set(stop["loaded"])
        assert all(torch.equal(exported[n], stop["loaded"][f"model.{n}"]) for n in exported)


def loaded_by_fewer(context: RankContext, folder: Path, run: Path) -> list[dict[str, Tensor]]:
    """Each of the three layouts' last checkpoints, cut by heads over two ranks."""
    states = []
    for number in (5, 6, 7):
        trainer = make_trainer(context, folder, "tp=2")
        trainer.load(run / f"step-00000{number}")
        states.append(whole_state(trainer))
    return states


def shards_and_updates(context: RankContext, folder: Path) -> dict[str, Any]:
    """Label tensors written through the shards; one step; an update of two engine ranks."""
    trainer = make_trainer(context, folder, "fsdp=2,tp=2")
    layout = trainer.layout()
    labels, start = {}, 0
    for name, shape in layout.model.tensor_shapes().items():
        count = torch.Size(shape).numel()
        labels[name] = torch.arange(start, start + count, dtype=torch.float32).view(shape)
        start += count
    expected = cut(layout, context.rank, labels, dtype=torch.float32)
    for name, shard in trainer.shards().items():
        assert shard.shape == expected[name].shape, name
        shard.copy_(expected[name])
    misplaced = [
        name
        for name, weight in trainer._policy.named_parameters()
        if not torch.equal(full_tensor(weight), labels[name])
    ]

    trainer = make_trainer(context, folder, "fsdp=2,tp=2", sequence_parallel=True)
    batch = make_random_batch()
    old_N = trainer.logprobs(batch)
    dist.all_reduce(old_N)
    metrics = trainer.forward_backward(replace(batch, old_N=old_N), GRPOConfig(kl_coef=0.0))
    trainer.step(0.01)
    trainer.advance_version()
    target = make_layout(layout.model, "engine:tp=2")
    src_ranks, dst_ranks = [0, 1, 2, 3], [1, 2]
    engine = None
    if context.rank in dst_ranks:
        engine = Receiver(empty(target, dst_ranks.index(context.rank), dtype=torch.float32))
    plan = plan_reshard(layout, target, src_ranks=src_ranks, dst_ranks=dst_ranks)
    sync = WeightSync(
        trainer, engine, proof=verify(plan), group=dist.group.WORLD, dtype=torch.float32
    )
    sync.sync(1)
    whole = {n: full_tensor(w).clone() for n, w in trainer._policy.named_parameters()}
    wrong: list[str] = []
    if engine is not None:
        fresh = cut(target, dst_ranks.index(context.rank), whole, dtype=torch.float32)
        wrong = [n for n in fresh if not torch.equal(engine.weights[n], fresh[n])]
    return {"misplaced": misplaced, "wrong": wrong, "approx_kl": metrics["approx_kl"]}


class Receiver:
    """The side of an engine that an update sees."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.weights = weights

    def tensors(self) -> dict[str, Tensor]:
        return self.weights

    def begin_update(self, version: int) -> None: ...

    def commit_update(self) -> None: ...


def test_shards_lie_where_the_layout_says_and_an_engine_is_updated_from_them(folder) -> None:
    for facts in run_ranks(shards_and_updates, 4, folder, timeout_s=120):
        # Before the first update the ratio is 1, bit for bit, whatever is cut over ranks.
        assert facts == {"misplaced": [], "wrong": [], "approx_kl": 0.0}
