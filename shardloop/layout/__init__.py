"""Layouts: which rank holds which element of which tensor, declared by rule. Floor 1.

`make_layout(model, "fsdp=4")` is the door; the planner and whoever allocates local tensors call it.

    parse     the grammar of layout strings
    schemes   hf and engine layouts, written as strips
    strips    what lies along one local dim
    tables    meshes, cuts, and their rows for one class
    layout    Layout, its local shapes and pieces
    fit       do arrays have the shapes that were declared
"""

from shardloop.layout.layout import Box, Layout, Piece, box_of
from shardloop.layout.parse import parse_layout
from shardloop.layout.schemes import make_layout

__all__ = ["Box", "Layout", "Piece", "box_of", "make_layout", "parse_layout"]
