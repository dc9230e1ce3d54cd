"""Files of torch.save, mapped into memory and never trusted. Called by formats with rank files.

Floor 3.

Such a file is a pickle, which could run anything. Only tensors and plain data are made from it;
what frameworks put beside them (their settings, enumerations, random states) becomes `Inert`: it
has the file's arguments and none of the framework's code. Any other name is refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardloop.convert.damage import damaged, demand_file
from shardloop.errors import CheckpointError

BYSTANDERS = ("_io.BytesIO", "argparse.Namespace", "deepspeed.", "megatron.", "numpy.")
"""Beginnings of the names that become inert. Transformer Engine keeps its extra state as bytes."""


class Inert:
    """Stands for an object of a framework; holds what the file says of it."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __new__(cls, *args: Any) -> "Inert":
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load_torch_file(path: Path) -> dict[str, Any]:
    """The mapping in a file; its tensors are views of the mapped file, and read when used.

    Raises:
        CheckpointError: there is no such file, it is cut short or damaged, needs a name that is
            not allowed, or holds no mapping.
    """
    demand_file(path)
    try:
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        refused = sorted(name for name in foreign if not name.startswith(BYSTANDERS))
        if refused:
            raise CheckpointError(
                f"{path}: a pickle that calls {', '.join(refused)}; only tensors and plain data "
                "are read. Save the weights alone, in a program that you trust"
            )
        inert: list[Any] = [(type(name, (Inert,), {}), name) for name in foreign]
        with torch.serialization.safe_globals(inert):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle or archive can raise anything
        raise damaged(path, error) from error
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: holds {type(content).__name__}, not a mapping")
    return dict(content)


def plain(value: Any) -> Any:
    """What an enumeration of a framework stands for; anything else is itself."""
    return value.args[0] if isinstance(value, Inert) and len(value.args) == 1 else value
