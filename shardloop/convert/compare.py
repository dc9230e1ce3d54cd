"""Do two checkpoints hold the same model, whatever their formats and layouts? Floor 3.

Called by `convert.execute` and `shardloop checkpoint verify`. Each side is read once, tensor by
tensor; what is compared is `reshard.fingerprint`, not the tensors.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from shardloop.convert.sources import Source, rank_tensors
from shardloop.errors import UsageError
from shardloop.reshard.copies import find_copies
from shardloop.reshard.fingerprint import local_fingerprints


def differing(
    one: Source, other: Source, *, dtypes: Mapping[str, torch.dtype] | None = None
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
    here, there = (fingerprints(source, dtypes) for source in (one, other))
    for index, name in enumerate(names):
        a, b = here[:, index], there[:, index]
        for side, prints in ((one, a), (other, b)):
            if bool((prints != prints[0]).any()):
                faults[name] = f"{name}: the ranks of {side.reader.path} hold different copies"
        if a[0] != b[0]:
            faults.setdefault(name, f"{name} differs")
    return list(faults.values())


def fingerprints(source: Source, dtypes: Mapping[str, torch.dtype]) -> Tensor:
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
        tensors = rank_tensors(source, rank)
        part = local_fingerprints(copies, rank, tensors, dtype=wire or torch.float32)  # type: ignore[arg-type]
        total = part if total is None else total + part
    assert total is not None, "a layout has a rank"
    return total
