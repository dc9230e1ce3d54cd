"""Training layouts under Hugging Face names: FSDP2, ZeRO-3, tensor, pipeline and expert parallel.

Called by `layout.schemes`. Floor 1.

    fsdp     dim 0 of what tp leaves, as `torch.chunk` cuts it: FSDP2, and DTensor's _StridedShard
             where tp cuts dim 0 too
    zero3    the elements of what tp leaves, flattened: ZeRO-3's partitions, without their padding
    pp       the head of a tied model is a copy of the embedding on the last stage
"""

from collections.abc import Iterator, Sequence
from math import prod

from shardloop.families.base import CanonicalModel, TensorClass
from shardloop.layout.grid import Grid, make_grids
from shardloop.layout.layout import LocalTensor
from shardloop.layout.parse import LayoutSpec
from shardloop.layout.stages import expert_cut, layer_cut
from shardloop.layout.strips import OWN, flat, pick, split
from shardloop.layout.tables import Axis, Cut
from shardloop.layout.tp import tp_cut

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def hf_tensors(model: CanonicalModel, spec: LayoutSpec) -> Iterator[LocalTensor]:
    """Every tensor under its own name."""
    grids = make_grids(spec)
    for c in model.classes:
        yield _local_tensor(model, c, grids.of(c))
    if model.tied and EMBEDDING in model.class_of and spec.size("pp") > 1:
        yield _local_tensor(model, model.class_of[EMBEDDING], grids.dense, head=True)


def _local_tensor(
    model: CanonicalModel, c: TensorClass, grid: Grid, *, head: bool = False
) -> LocalTensor:
    own = [tp_cut(model, 2 + i, [(OWN, dim)], grid.tp) for i, dim in enumerate(c.dims)]
    if grid.zero3 is not None:
        own = [_flattened(own, grid.zero3)]
    elif grid.fsdp is not None:
        own[0] = Cut(own[0].dims, (*own[0].axes, grid.fsdp), split(own[0].strips, grid.fsdp.size))
    return LocalTensor(
        template=HEAD if head else c.template,
        keys=(c.key,),
        mesh=grid.mesh,
        cuts=(layer_cut(model, c.layers, grid.pp, at_end=head), expert_cut(c, grid.ep), *own),
    )


def _flattened(cuts: Sequence[Cut], zero3: Axis) -> Cut:
    """Equal chunks of the elements that all these cuts leave to a rank."""
    axes = tuple(axis for cut in cuts for axis in cut.axes)
    num_parts = prod(axis.size for axis in axes)
    boxes = flat(*(cut.strips if cut.axes else pick(cut.strips, [[0]] * num_parts) for cut in cuts))
    dims = tuple(dim for cut in cuts for dim in cut.dims)
    return Cut(dims, (*axes, zero3), split(boxes, zero3.size))
