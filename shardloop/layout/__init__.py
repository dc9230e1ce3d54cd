"""Layouts: which rank holds which element of which tensor, declared by rule. Floor 1.

`make_layout(model, "fsdp=4")` is the door; the planner and whoever allocates local tensors call it.

    parse      the grammar of layout strings
    schemes    which file a string belongs to, and whether it fits the model
    hf         training layouts under Hugging Face names: FSDP2, ZeRO-3, tp, pp, ep
    megatron   Megatron-Core's names, fusing and stage-local numbers
    engine     fused and stacked tensors of inference engines
    grid       the two meshes of a layout: dense tensors', experts'
    tp         how tensor parallelism cuts each meaning of a dim
    stages     which layers and experts a rank has
    strips     what lies along one local dim
    tables     meshes, cuts, and their rows for one class
    layout     Layout, its local shapes and pieces
    observed   layouts read from placements, and how two differ
    chunks     layouts read from boxes and their holders
    fit        do arrays have the shapes that were declared
"""

from shardloop.layout.layout import Box, Layout, Piece, View, box_of
from shardloop.layout.parse import parse_layout
from shardloop.layout.schemes import make_layout

__all__ = ["Box", "Layout", "Piece", "View", "box_of", "make_layout", "parse_layout"]
