"""What settings need of each other and of the machine; refused before a process starts. Floor 4.

Called by `controller.setup`, and by what runs a part of a run alone (`controller.sft`,
`controller.inference`).
"""

import torch

from shardloop.config import TrainConfig, WorkersConfig
from shardloop.errors import UsageError
from shardloop.layout import Layout, parse_layout

ZERO_GAP_DTYPES = ("float32", "float64")


def demand_devices(workers: WorkersConfig, *, num_ranks: int) -> None:
    """
    Raises:
        UsageError: workers.device=cuda, and this machine has fewer GPUs than there are ranks.
    """
    if workers.device != "cuda" or torch.cuda.device_count() >= num_ranks:
        return
    raise UsageError(
        f"workers.device=cuda with {num_ranks} ranks, but torch sees {torch.cuda.device_count()} "
        "GPUs and every rank needs its own: use smaller layouts, workers.colocate or "
        "workers.device=cpu"
    )


def demand_buffer(config: TrainConfig) -> None:
    """
    Raises:
        UsageError: the penalty of long completions would begin before their first token.
    """
    buffer, max_tokens = config.grpo.overlong_buffer, config.sampling.max_tokens
    if buffer > max_tokens:
        raise UsageError(
            f"grpo.overlong-buffer={buffer} with sampling.max-tokens={max_tokens}; choose a buffer "
            f"from 1 to {max_tokens}"
        )


def demand_transport(config: TrainConfig, *, engine: Layout) -> None:
    """
    Raises:
        UsageError: a relay without replicas to relay between, or on the trainer's own ranks.
    """
    if config.engine.transport != "relay":
        return
    if config.workers.colocate or parse_layout(engine.spec).size("replicas") == 1:
        raise UsageError(
            f"engine.transport=relay with engine.layout={engine.spec} and workers.colocate="
            f"{str(config.workers.colocate).lower()}; it passes weights on from replica to "
            "replica: choose engine:replicas=R,tp=N on ranks of its own, or another transport"
        )


def demand_zero_gap(config: TrainConfig, *, trainer: Layout, engine: Layout) -> None:
    """Equal log-probs need the same sums in the same order on both sides.

    Raises:
        UsageError: zero_gap with layouts or dtypes that cannot give them; names every one.
    """
    if not config.zero_gap:
        return
    faults = []
    for layout, allowed in ((trainer, "fsdp=N or dp=R,fsdp=N"), (engine, "engine:replicas=R,tp=1")):
        tp = {axis.name: axis.size for axis in layout.mesh}.get("tp", 1)
        if tp > 1:
            faults.append(f"layout {layout.spec} has tp={tp}, choose {allowed}")
    dtypes = config.trainer.dtype, config.engine.dtype
    if dtypes[0] != dtypes[1] or dtypes[0] not in ZERO_GAP_DTYPES:
        faults.append(
            f"trainer.dtype={dtypes[0]} and engine.dtype={dtypes[1]}, choose "
            f"{' or '.join(ZERO_GAP_DTYPES)} for both"
        )
    if config.trainer.compute_dtype is not None:
        faults.append(f"trainer.compute-dtype={config.trainer.compute_dtype}, leave it out")
    if faults:
        raise UsageError(f"zero-gap needs trainer and engine to compute alike: {'; '.join(faults)}")
