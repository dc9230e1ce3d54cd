"""Sharded checkpoints: written whole or not at all, readable at any number of ranks. Floor 3.

Called by the trainer (`Saver`, load) and by the run (latest). One checkpoint is a folder:

    step-000050/
      .metadata, __0_0.distcp …   tensors, each rank its own shards (torch.distributed.checkpoint)
      driver.json                 whatever the driver wants back
      trainer.json                version of the weights; written last: it makes the folder complete

    folder    names, the newest, retention          metadata  what a folder holds; damage
    notes     the two JSON files                    faults    what does not fit a trainer
    writing   one save, on all ranks together       reading   one load, on all ranks together
    staging   copies that training cannot change    saver     one save at a time, in a thread
    plain     torch's metadata, a pickle, of which nothing is run
"""

from shardloop.checkpoint.faults import compare_keys
from shardloop.checkpoint.folder import checkpoint_name, latest_checkpoint, prune_checkpoints
from shardloop.checkpoint.metadata import read_metadata
from shardloop.checkpoint.notes import DRIVER_FILE, TRAINER_FILE, Restored
from shardloop.checkpoint.reading import load_checkpoint
from shardloop.checkpoint.saver import Saver, SaveReport
from shardloop.checkpoint.writing import save_checkpoint

__all__ = [
    "DRIVER_FILE",
    "TRAINER_FILE",
    "Restored",
    "SaveReport",
    "Saver",
    "checkpoint_name",
    "compare_keys",
    "latest_checkpoint",
    "load_checkpoint",
    "prune_checkpoints",
    "read_metadata",
    "save_checkpoint",
]
