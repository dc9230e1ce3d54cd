"""What a checkpoint is converted to: a format, its layout, and how a folder of it is written.

Called by `convert.execute` and the command line. Floor 3.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from shardloop.convert.dcp_files import write_dcp
from shardloop.convert.megatron_files import rank_folders, write_megatron
from shardloop.errors import UsageError
from shardloop.hf.shards import MAX_SHARD_BYTES, TensorSpec
from shardloop.hf.tokenizer import copy_tokenizer
from shardloop.hf.weights import write_hf_folder
from shardloop.layout.parse import parse_layout

WRITTEN = ("hf", "dcp", "megatron")
WHOLE = "tp=1"

Read = Callable[[int, str], Tensor]
"""Rank and local name of a tensor -> its elements, on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Target:
    format: str
    spec: str
    """Layout of what is written."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    """Of a safetensors file."""

    def write(
        self,
        folder: Path,
        *,
        ranks: Sequence[Mapping[str, TensorSpec]],
        read: Read,
        config: Mapping[str, Any],
        tokenizer_from: Path | None,
    ) -> None:
        """Write all of a folder that is there and empty, the model's config and tokenizer too.

        Args:
            ranks: of each rank of the layout, what it holds by local name.
        Raises:
            OSError: it cannot be written. Whatever `read` raises.
        """
        if self.format == "hf":
            write_hf_folder(
                folder,
                config=config,
                specs=ranks[0],
                read=lambda name: read(0, name),
                tokenizer_from=tokenizer_from,
                max_shard_bytes=self.max_shard_bytes,
            )
            return
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, folder)
        (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
        if self.format == "dcp":
            write_dcp(folder, ranks[0], lambda name: read(0, name))
        else:
            write_megatron(folder, self.spec, ranks, read)


def parse_target(text: str, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> Target:
    """
    Args:
        text: `hf`, `dcp`, or Megatron's layout, such as `megatron:tp=2,pp=2`.
    Raises:
        UsageError: it is none of these. LayoutError: the layout cannot be made, or written.
    """
    name, colon, _ = text.partition(":")
    if name not in WRITTEN or (colon and name != "megatron"):
        raise UsageError(
            f"to={text!r}; choose from {', '.join(WRITTEN)}, for Megatron with its layout, such as "
            "megatron:tp=2,pp=2"
        )
    if name == "megatron":
        spec = text if colon else "megatron:tp=1"
        rank_folders(parse_layout(spec))
        return Target(format=name, spec=spec)
    return Target(format=name, spec=WHOLE, max_shard_bytes=max_shard_bytes)
