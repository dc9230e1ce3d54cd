"""What carries a run: the trainer's and the engine's cut, the processes. Floor 0."""

from dataclasses import dataclass
from typing import Literal

from shardloop.config.checks import above_zero, at_least, check_kinds, require
from shardloop.config.learning import MOST_PROMPTS

Device = Literal["cpu", "cuda"]
DTypeName = Literal["float32", "float64", "bfloat16"]
Sleep = Literal["never", "cache", "weights"]
TransportName = Literal["p2p", "shm", "delta", "relay", "gather"]
"""How new weights reach the engine."""

MOST_TIMEOUT_S = 1e7


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig:
    """How the trained model is cut and fed."""

    layout: str = "fsdp=2"
    """Layout of the trainer's ranks: axes dp (replicas), fsdp and tp in this order, such as fsdp=2
    or dp=2,fsdp=2,tp=2."""
    dtype: DTypeName = "float32"
    """Dtype of master weights, and of arithmetic unless compute_dtype says otherwise."""
    compute_dtype: DTypeName | None = None
    """bfloat16 computes in it on float32 master weights; for GPUs, since CPUs are slow at it."""
    sequence_parallel: bool = False
    """Between the tensor-parallel parts, cut activations along the tokens; needs tp."""
    activation_checkpointing: bool = False
    """Compute each layer again in backward instead of keeping its activations."""
    row_tokens: int = 256
    """Sequences are packed into rows of at most this many tokens (a longer one has its own row)."""
    rows_per_micro_batch: int = 8
    """Rows that go through the model at once on one rank."""

    def __post_init__(self) -> None:
        check_kinds("trainer", self)
        require(
            "trainer.compute-dtype",
            self.compute_dtype,
            self.compute_dtype in (None, self.dtype)
            or (self.compute_dtype, self.dtype) == ("bfloat16", "float32"),
            f"with trainer.dtype={self.dtype} leave it out"
            + (" or choose bfloat16" if self.dtype == "float32" else ""),
        )
        at_least("trainer", 2, most=2**20, row_tokens=self.row_tokens)
        at_least("trainer", 1, most=MOST_PROMPTS, rows_per_micro_batch=self.rows_per_micro_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How the sampling side is cut and sized."""

    layout: str = "engine:tp=2"
    """Layout of the engine's ranks: engine:tp=N, or engine:replicas=R,tp=N."""
    dtype: DTypeName = "float32"
    """Dtype of the engine's weights and arithmetic; weights are converted as they are sent."""
    max_slots: int = 256
    """Sequences decoded at the same time by each replica."""
    sleep: Sleep = "never"
    """What the engine gives up while the trainer works: nothing, its cache, or also its weights."""
    transport: TransportName = "p2p"
    """How new weights reach the engine: messages; memory that the ranks of one host share; only
    what changed (for slow networks); messages passed on from replica to replica; whole tensors."""

    def __post_init__(self) -> None:
        check_kinds("engine", self)
        at_least("engine", 1, most=MOST_PROMPTS, max_slots=self.max_slots)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersConfig:
    device: Device = "cpu"
    """Where ranks compute: cpu (gloo) or cuda (NCCL)."""
    threads: int = 1
    """CPU threads of each rank."""
    timeout_s: float = 300.0
    """Seconds after which a call or a collective that has not answered is an error."""
    colocate: bool = False
    """Put the engine on the trainer's ranks instead of ranks of its own."""

    def __post_init__(self) -> None:
        check_kinds("workers", self)
        at_least("workers", 1, most=1024, threads=self.threads)
        above_zero("workers", timeout_s=self.timeout_s)
        at_least("workers", 0, most=MOST_TIMEOUT_S, timeout_s=self.timeout_s)
