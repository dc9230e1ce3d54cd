"""An engine on its own, loaded from a model folder: evaluation and generation without training.

Floor 4. Called by `shardloop eval`, `shardloop generate` and notebooks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardloop import hf
from shardloop.config import EngineConfig, WorkersConfig
from shardloop.controller.groups import LocalWorkers, WorkerGroup
from shardloop.controller.roles import build_engine
from shardloop.engines.local import LocalEngine
from shardloop.families import canonical_model
from shardloop.layout import make_layout
from shardloop.parallel.worker import RankContext


@contextmanager
def engine_from_folder(
    model_dir: Path, engine: EngineConfig, workers: WorkersConfig
) -> Iterator[WorkerGroup]:
    """Worker processes that hold a folder's model, cut by `engine.layout`, until the block ends.

    Raises:
        ModelError: the folder is no usable model. LayoutError: it cannot be cut so.
    """
    hf_config = hf.load_config(model_dir)
    layout = make_layout(canonical_model(hf_config), engine.layout)
    with LocalWorkers(
        {"engine": range(layout.world_size)},
        threads=workers.threads,
        timeout_s=workers.timeout_s,
        device=workers.device,
    ) as processes:
        yield processes.spawn(
            "engine", build_loaded_engine, engine, hf_config, model_dir, role="engine"
        )


def build_loaded_engine(
    context: RankContext, engine: EngineConfig, hf_config: Mapping[str, Any], model_dir: Path
) -> LocalEngine:
    """On an engine rank: an engine that holds its part of the folder's weights as version 0."""
    loaded = build_engine(context, engine, hf_config)
    loaded.load_from_state_dict(hf.load_weights(model_dir))
    return loaded
