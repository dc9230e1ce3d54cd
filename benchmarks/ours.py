"""Our engine and our trainer in this very process, as one rank each. Used by the benchmarks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

# A process of one rank talks to nobody, and gloo shall look for no network card.
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist

from shardloop import hf
from shardloop.config import OptimConfig, TrainerConfig
from shardloop.engines.local import LocalEngine
from shardloop.families import canonical_model
from shardloop.layout import make_layout
from shardloop.model import SingleProcess
from shardloop.parallel.context import RankContext
from shardloop.trainer import Trainer

ROLE = "trainer"


def make_engine(folder: Path, *, max_slots: int) -> LocalEngine:
    """A float32 engine with the weights of a model folder."""
    config = hf.load_config(folder)
    engine = LocalEngine(
        config,
        layout=make_layout(canonical_model(config), "engine:tp=1"),
        rank=0,
        comm=SingleProcess(),
        dtype=torch.float32,
        max_slots=max_slots,
    )
    engine.load_from_state_dict(hf.load_weights(folder))
    return engine


@contextmanager
def one_rank() -> Iterator[RankContext]:
    """A process group of this process alone, until the block ends."""
    with TemporaryDirectory(prefix="shardloop-bench-") as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield RankContext(
                rank=0,
                world_size=1,
                device=torch.device("cpu"),
                roles={ROLE: (0,)},
                groups={ROLE: dist.group.WORLD},
                collective_timeout_s=60.0,
            )
        finally:
            dist.destroy_process_group()


def make_trainer(
    context: RankContext, folder: Path, *, config: TrainerConfig, optim: OptimConfig
) -> Trainer:
    """A trainer without a reference policy."""
    return Trainer(
        context, model_dir=folder, config=config, optim=optim, reference=False, role=ROLE
    )
