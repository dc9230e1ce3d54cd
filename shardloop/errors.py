"""Every error that a user can meet, and the exit code of each. Floor 0.

    ShardloopError
    ├── UsageError (ValueError)     2  a flag, a config, a path or their combination is wrong
    │   ├── ModelError              2  a model folder is incomplete, unknown or does not fit
    │   └── LayoutError             2  a layout cannot be made (TP that does not divide)
    ├── TaskError (ValueError)      3  a task has no prompts, or prompts that cannot be used
    ├── RewardError                 3  a reward raised, or returned no finite number
    ├── PlanError                   4  a reshard plan failed its proof or does not fit the tensors
    │   └── FingerprintError        4  weights differ after a transfer
    ├── WorkerError                 5  a worker process raised; carries its traceback
    │   ├── WorkerDied              5
    │   ├── WorkerTimeout           5
    │   └── PolicyDiverged          5  weights, logits, log-probs or gradients are not finite
    ├── CheckpointError             6  a checkpoint cannot be written or read
    ├── DownloadError               7  an optional download is not possible (no network)
    └── Interrupted               130  stopped by Ctrl-C; the run can be resumed

Any other exception is a fault of ours: exit code 1, with a traceback. All of these pickle, because
they cross processes.
"""


class ShardloopError(Exception):
    """Base of the tree; its text says what was wrong, the value, and what is allowed."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)


class UsageError(ShardloopError, ValueError):
    exit_code = 2


class ModelError(UsageError):
    pass


class LayoutError(UsageError):
    pass


class TaskError(ShardloopError, ValueError):
    exit_code = 3


class RewardError(ShardloopError):
    exit_code = 3


class PlanError(ShardloopError):
    exit_code = 4


class FingerprintError(PlanError):
    pass


class WorkerError(ShardloopError):
    exit_code = 5


class WorkerDied(WorkerError):
    pass


class WorkerTimeout(WorkerError):
    pass


class PolicyDiverged(WorkerError):
    pass


class CheckpointError(ShardloopError):
    exit_code = 6


class DownloadError(ShardloopError):
    exit_code = 7


class Interrupted(ShardloopError):
    exit_code = 130


def how_to_install(extra: str) -> str:
    """What an error about a missing extra tells to do."""
    checkout = f".venv/bin/pip install -c constraints.txt -e '.[{extra}]'"
    return f"pip install 'shardloop[{extra}]' (in a checkout: {checkout})"
