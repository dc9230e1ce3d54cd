"""Do two checkpoints hold the same model, whatever their formats and layouts? Floor 3.

Called by `convert.execute` and `shardloop checkpoint verify`. Each side is read once, tensor by
tensor; what is compared is `reshard.fingerprint`, not the tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardloop.convert.sources import Source
from shardloop.convert.store import StoredTensors
from shardloop.errors import UsageError
from shardloop.reshard.copies import find_copies
from shardloop.reshard.fingerprint import local_fingerprints

Progress = Callable[[str, int, int], None]
"""What is done, bytes so far, bytes in all."""


def differing(
    one: Source,
    other: Source,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    progress: Progress,
) -> list[str]:
    """The canonical tensors of which some element differs between two sources without faults, or
    between the copies that ranks of one of them hold.

    Args:
        dtypes: by name, what both are compared in; None: that of both, which must be the same.
    Raises:
        UsageError: they are of different models.
    """
    names, others = (sorted(source.model.tensor_shapes()) for source in (one, other))
    if one.model.tensor_shapes() != other.model.tensor_shapes():
        only = sorted({*names} ^ {*others})[:3]
        raise UsageError(f"the models differ: {', '.join(only) or 'in the shapes of tensors'}")
    left, right = one.dtypes(), other.dtypes()
    if dtypes is None:
        faults = {
            name: f"{name} is {left[name]} and {right[name]}"
            for name in names
            if left[name] != right[name]
        }
        dtypes = left
    else:
        faults = {}
    count = _Count(total=sum(map(_num_bytes, (one, other))), progress=progress)
    here, there = (fingerprints(source, dtypes, count) for source in (one, other))
    for index, name in enumerate(names):
        a, b = here[:, index], there[:, index]
        for side, prints in ((one, a), (other, b)):
            if bool((prints != prints[0]).any()):
                faults[name] = f"{name}: the ranks of {side.reader.path} hold different copies"
        if a[0] != b[0]:
            faults.setdefault(name, f"{name} differs")
    return list(faults.values())


def _num_bytes(source: Source) -> int:
    stored = (t for rank in range(source.layout.world_size) for t in source.tensors(rank).values())
    return sum(tensor.num_bytes for tensor in stored)


@dataclass
class _Count:
    """Tells the progress of reads; what nobody compares, such as padding, is not counted."""

    total: int
    progress: Progress
    done: int = 0

    def __call__(self, num_bytes: int) -> None:
        self.done += num_bytes
        self.progress("compared", self.done, self.total)


def fingerprints(
    source: Source, dtypes: Mapping[str, torch.dtype], on_read: Callable[[int], None]
) -> Tensor:
    """int64 [prints, canonical tensors by sorted name] of a whole checkpoint.

    Taken in the widest of `dtypes`, to which the conversion is one to one; where there is but one,
    in that.
    """
    copies = find_copies(source.layout)
    wire: torch.dtype | None = None
    for name, dtype in dtypes.items():
        if name not in source.declared_dtypes:
            wire = dtype if wire is None else torch.promote_types(wire, dtype)
    total: Tensor | None = None
    for rank in range(source.layout.world_size):
        tensors = StoredTensors(source.reader, rank, on_read)
        part = local_fingerprints(copies, rank, tensors, dtype=wire or torch.float32)
        total = part if total is None else total + part
    assert total is not None, "a layout has a rank"
    return total
