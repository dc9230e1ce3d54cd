"""Loads a checkpoint on all ranks, whatever the number of ranks that saved it. Floor 3.

Called by the trainer.
"""

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from shardloop.checkpoint.faults import compare_keys
from shardloop.checkpoint.folder import is_complete
from shardloop.checkpoint.metadata import damaged, read_saved
from shardloop.checkpoint.notes import Restored
from shardloop.checkpoint.plain import PlainReader
from shardloop.errors import CheckpointError
from shardloop.parallel.agree import together


def load_checkpoint(
    path: Path, state: Mapping[str, Tensor], *, group: dist.ProcessGroup
) -> Restored:
    """Collective over `group`: fill `state` in place from a folder saved at any number of ranks.

    Raises:
        CheckpointError: on every rank. Before anything changes: no complete checkpoint there, one
            with missing, short or altered files, or keys that are extra, missing, or of another
            dtype or shape: the kinds of difference are all listed, with the first keys of each.
            Later: files of the right length that cannot be read; `state` may be half filled.
    """
    restored = together(group, lambda: _check_saved(path, state), path=path)
    together(group, lambda: _fill(path, state, group), path=path)
    return restored


def _check_saved(path: Path, state: Mapping[str, Tensor]) -> Restored:
    if not is_complete(path):
        raise CheckpointError("no complete checkpoint there; give a step-NNNNNN folder of a run")
    metadata, restored = read_saved(path)
    faults = compare_keys(metadata.state_dict_metadata, state)
    if faults:
        raise CheckpointError("does not fit this trainer; " + "; ".join(faults))
    return restored


def _fill(path: Path, state: Mapping[str, Tensor], group: dist.ProcessGroup) -> None:
    try:
        load(dict(state), storage_reader=PlainReader(path), process_group=group)
    except CheckpointException as error:  # of any rank, and raised on all
        cause = next((cause for cause, _ in error.failures.values()), error)
        raise damaged(path, cause) from error
