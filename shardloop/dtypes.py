"""torch dtypes by the names that models declare. Floor 1.

Called by whoever moves or sums tensors that have a dtype of their own.
"""

import torch


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch calls `name`, such as float32 or float8_e4m3fn."""
    found = getattr(torch, name, None)
    assert isinstance(found, torch.dtype), f"a model declares dtype {name!r}, torch has no such"
    return found
