"""An engine on its own, loaded from a model folder: evaluation and generation without training.

Floor 4. Called by `shardloop eval`, `shardloop generate` and notebooks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardloop.config import EngineConfig, WorkersConfig
from shardloop.controller.groups import LocalWorkers
from shardloop.controller.roles import build_engine
from shardloop.controller.rollouts import Sampler
from shardloop.controller.setup import engine_layout, read_model
from shardloop.types import Sampling, Tokenizer


@contextmanager
def sampler_from_folder(
    model_dir: Path,
    *,
    tokenizer: Tokenizer,
    sampling: Sampling,
    engine: EngineConfig,
    workers: WorkersConfig,
) -> Iterator[Sampler]:
    """Worker processes that hold a folder's model, cut by `engine.layout`, until the block ends.

    Raises:
        ModelError: the folder is no usable model. LayoutError: it cannot be cut so.
    """
    model = read_model(model_dir)
    layout = engine_layout(model.canonical, engine.layout)
    with LocalWorkers({"engine": range(layout.world_size)}, workers) as processes:
        group = processes.spawn(
            "engine", build_engine, engine, model.hf_config, weights_from=model_dir, role="engine"
        )
        yield Sampler(
            engine=group,
            tokenizer=tokenizer,
            sampling=sampling,
            context_length=model.context_length,
        )
