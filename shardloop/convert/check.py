"""Whether a checkpoint is whole: all files, all tensors, every element a number. Floor 3.

Called by `shardloop checkpoint verify`. What formats can see (missing and short files, damaged
headers, ranks) they have refused when the checkpoint was opened.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from shardloop.checkpoint.chunks import demand_sound
from shardloop.checkpoint.notes import TRAINER_FILE
from shardloop.convert.compare import Progress
from shardloop.convert.damage import damaged
from shardloop.convert.look import files
from shardloop.convert.store import Reader, whole
from shardloop.errors import CheckpointError

BLOCK = 1 << 22
"""Elements looked at at a time."""
_OURS = re.compile(r"step-\d{6,}(\.old)?")


def element_faults(reader: Reader, *, progress: Progress) -> Iterator[str]:
    """Reads everything, one tensor at a time: each file whose checksums are not those of its bytes
    (safetensors has none), each tensor that cannot be read or has elements that are not finite."""
    if _OURS.fullmatch(reader.path.name) and not (reader.path / TRAINER_FILE).is_file():
        yield f"no {TRAINER_FILE}: it was not written to its end"
    yield from _altered_archives(reader)
    entries = list(reader.everything())
    total = sum(stored.num_bytes for _, _, stored in entries)
    done = 0
    for rank, name, stored in entries:
        where = f"rank {rank}: {name}" if reader.num_ranks > 1 else name
        if stored.num_elements:
            try:
                count = _num_not_finite(reader.read(rank, name, whole(stored.shape)))
            except CheckpointError as error:
                yield f"{where}: {error}"
            else:
                if count:
                    yield f"{where}: {count} of {stored.num_elements} elements are not finite"
        done += stored.num_bytes
        progress("read", done, total)


def _altered_archives(reader: Reader) -> Iterator[str]:
    """Those of the files that are one archive each; of others, each chunk is checked when read."""
    for file in files(reader):
        if file.suffix == ".pt":
            try:
                demand_sound(file)
            except Exception as error:  # a damaged archive can raise anything
                yield str(damaged(file, error))


def _num_not_finite(tensor: Tensor) -> int:
    if not tensor.is_floating_point():
        return 0
    count = 0
    for block in tensor.reshape(-1).split(BLOCK):
        wide = block.float() if block.dtype.itemsize == 1 else block
        count += int((~torch.isfinite(wide)).sum())
    return count
