"""Settings of a run: frozen dataclasses, composed, checked when made. Floor 0.

The docstring under a field is its help text on the command line. Vetted sets of values are in
`shardloop.presets`.

    learning   sampling, the algorithm, the optimizer, the warm start
    machines   how trainer and engine are cut, and the processes
    run        all of them together, measurements, checkpoints
    plain      as JSON, and back
    checks     what every field goes through
"""

from shardloop.config.learning import (
    AdvantageKind,
    Aggregation,
    CorrectionKind,
    CorrectionMode,
    GRPOConfig,
    KLEstimator,
    KLPlace,
    OptimConfig,
    Overlong,
    PolicyLossKind,
    SamplingConfig,
    Schedule,
    SFTConfig,
    Std,
)
from shardloop.config.machines import (
    Device,
    DTypeName,
    EngineConfig,
    Sleep,
    TrainerConfig,
    TransportName,
    WorkersConfig,
)
from shardloop.config.plain import (
    from_dict,
    to_dict,
)
from shardloop.config.run import (
    CheckpointConfig,
    EvalConfig,
    Tracker,
    TrainConfig,
)

__all__ = [
    "AdvantageKind",
    "Aggregation",
    "CheckpointConfig",
    "CorrectionKind",
    "CorrectionMode",
    "DTypeName",
    "Device",
    "EngineConfig",
    "EvalConfig",
    "GRPOConfig",
    "KLEstimator",
    "KLPlace",
    "OptimConfig",
    "Overlong",
    "PolicyLossKind",
    "SFTConfig",
    "SamplingConfig",
    "Schedule",
    "Sleep",
    "Std",
    "Tracker",
    "TrainConfig",
    "TrainerConfig",
    "TransportName",
    "WorkersConfig",
    "from_dict",
    "to_dict",
]
