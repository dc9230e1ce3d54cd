"""Do arrays have the names and shapes that were declared for them? Floor 1.

Called by whoever takes tensors by name: `transport.bind`, `reshard.inprocess`,
`engines.weights` and `hf`.
"""

from collections.abc import Mapping
from typing import Any


def shape_faults(expected: Mapping[str, tuple[int, ...]], given: Mapping[str, Any]) -> list[str]:
    """Every name that is missing or unexpected, and every array (numpy or torch) of another shape.

    An array that has no elements may be left out.
    """
    faults = [
        f"missing: {name} of shape {shape}"
        for name, shape in expected.items()
        if name not in given and 0 not in shape
    ]
    shapes = {name: tuple(array.shape) for name, array in given.items()}
    faults += [
        f"unexpected: {name} of shape {shape}"
        for name, shape in shapes.items()
        if name not in expected
    ]
    faults += [
        f"shape of {name} is {shape}, it must be {expected[name]}"
        for name, shape in shapes.items()
        if name in expected and shape != expected[name]
    ]
    return faults
