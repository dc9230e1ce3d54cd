"""What in a checkpoint does not fit the tensors that are to be filled from it. Floor 3.

Called by `checkpoint.reading`.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_SHOWN_KEYS = 3


def compare_keys(saved: Mapping[str, Any], state: Mapping[str, Tensor]) -> list[str]:
    """Every kind of difference between saved metadata and live tensors, with the first keys of each
    and the setting that decides it.

    Torch itself passes over keys that are only saved, and casts dtypes, without a word.
    """
    missing = sorted(set(state) - set(saved))
    extra = sorted(set(saved) - set(state))
    both = {key: (saved[key], state[key]) for key in sorted(set(state) & set(saved))}
    odd = [key for key, (entry, _) in both.items() if not isinstance(entry, TensorStorageMetadata)]
    tensors = {
        key: (a.properties.dtype, a.size, b) for key, (a, b) in both.items() if key not in odd
    }
    dtypes = {key: (a, b.dtype) for key, (a, _, b) in tensors.items() if a != b.dtype}
    shapes = {key: (list(a), list(b.shape)) for key, (_, a, b) in tensors.items() if a != b.shape}
    faults = {
        "missing in the checkpoint": missing,
        "extra in the checkpoint": extra,
        "no tensor in the checkpoint": odd,
        "of another dtype": [f"{key} is {a} there but {b} here" for key, (a, b) in dtypes.items()],
        "of another shape": [f"{key} is {a} there but {b} here" for key, (a, b) in shapes.items()],
    }
    lines = [_first_of(what, items) for what, items in faults.items() if items]
    if dtypes:
        there = sorted({str(a).removeprefix("torch.") for a, _ in dtypes.values()})
        lines.append(f"set trainer.dtype to {' or '.join(there)}, as it was saved")
    if any(key.startswith("reference.") for key in missing):
        lines.append("it was saved without a reference policy: set grpo.kl-coef to 0")
    if any(key.startswith("reference.") for key in extra):
        lines.append("it was saved with a reference policy: set grpo.kl-coef above 0")
    return lines


def _first_of(what: str, items: list[str]) -> str:
    more = len(items) - _SHOWN_KEYS
    shown = ", ".join(items[:_SHOWN_KEYS]) + (f" and {more} more" if more > 0 else "")
    return f"{len(items)} {what}: {shown}"
