"""An engine on its own, loaded from a model folder: evaluation and generation without training.

Floor 4. Called by `shardloop eval`, `shardloop generate` and notebooks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardloop.config import EngineConfig, WorkersConfig
from shardloop.controller.demands import demand_devices
from shardloop.controller.engines import Engines
from shardloop.controller.groups import LocalWorkers
from shardloop.controller.placement import engine_roles
from shardloop.controller.roles import build_engine
from shardloop.controller.rollouts import Sampler
from shardloop.controller.setup import engine_layout, num_replicas, read_model
from shardloop.tasks import no_env
from shardloop.types import Env, Prompt, Sampling, Tokenizer


@contextmanager
def sampler_from_folder(
    model_dir: Path,
    *,
    tokenizer: Tokenizer,
    sampling: Sampling,
    engine: EngineConfig,
    workers: WorkersConfig,
    make_env: Callable[[Prompt], Env | None] = no_env,
) -> Iterator[Sampler]:
    """Worker processes that hold a folder's model, cut by `engine.layout`, until the block ends.

    Raises:
        ModelError: the folder is no usable model. LayoutError: it cannot be cut so.
        UsageError: too few GPUs.
    """
    model = read_model(model_dir)
    layout = engine_layout(model.canonical, engine.layout)
    demand_devices(workers, num_ranks=layout.world_size)
    replicas = num_replicas(engine.layout)
    roles = engine_roles(range(layout.world_size), num_replicas=replicas)
    with LocalWorkers(roles, workers) as processes:
        group = processes.spawn(
            "engine",
            build_engine,
            engine,
            model.hf_config,
            weights_from=model_dir,
            tokenizer_from=model_dir if sampling.stop else None,
            role="engine",
        )
        yield Sampler(
            engine=Engines(group, num_replicas=replicas),
            tokenizer=tokenizer,
            sampling=sampling,
            context_length=model.context_length,
            make_env=make_env,
        )
