"""Checkpoints of other programs and our own: looked into, checked, converted. Floor 3.

Called by `shardloop checkpoint`. One process, no group; never the whole model in memory.

    folder ──formats──▶ Reader ──sources──▶ Source ┐
                                                   ├─ plan, proof ──▶ execute ──▶ folder
    --to ──────────targets────────────────▶ Target ┘                    │
                                          compare (fingerprints) ◀──────┘

    store        what a reader is; boxes of tensors that stay in their files
    hf_files     safetensors                     dcp_files       torch.distributed.checkpoint
    megatron_files   a file for each (tp, pp, ep) rank     zero3_files   DeepSpeed's flat partitions
    torch_files  pickles, of which nothing is run

Formats are told by their files, layouts by their names: what moves where is the reshard plan's.
"""

from shardloop.convert.compare import differing
from shardloop.convert.execute import Report, convert
from shardloop.convert.formats import open_checkpoint
from shardloop.convert.sources import Source, open_source, source_faults
from shardloop.convert.store import Reader, Stored
from shardloop.convert.targets import Target, parse_target

__all__ = [
    "Reader",
    "Report",
    "Source",
    "Stored",
    "Target",
    "convert",
    "differing",
    "open_checkpoint",
    "open_source",
    "parse_target",
    "source_faults",
]
