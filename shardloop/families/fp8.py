"""Block-FP8 weights with their scales as further classes. Called by whoever plans layouts of FP8
checkpoints and engines. Floor 1.

As DeepSeek-V3's checkpoint has them: each linear weight [out, in] within the layers is kept in
`float8_e4m3fn`, and beside it `weight_scale_inv`, float32 [ceil(out / 128), ceil(in / 128)]: the
factor of each block of 128 x 128. Embedding, head, norms and the router are not quantised.
"""

from collections.abc import Iterator
from dataclasses import replace

from shardloop.errors import ModelError
from shardloop.families.base import CanonicalModel, Dim, TensorClass
from shardloop.families.fields import MOST

SCALE = "_scale_inv"
"""What a scale's key has after that of its weight."""


def with_block_fp8(model: CanonicalModel, *, block: int = 128) -> CanonicalModel:
    """The model with its linear weights in FP8 and a scale for every block of each.

    A dim of a scale has the weight's meaning and `Dim.block` = `block`: its element i belongs to
    elements i * block up to (i + 1) * block of the weight, of which the last block may have fewer.

    Raises:
        ModelError: `block` is no whole number from 1 to `MOST`, or the model is in FP8 already.
    """
    if type(block) is not int or not 1 <= block <= MOST:
        raise ModelError(f"block={block!r}; it must be a whole number from 1 to {MOST}")
    if any(c.key.endswith(SCALE) for c in model.classes):
        raise ModelError(f"model {model.name} is in FP8 already; give the model without scales")
    classes = tuple(made for c in model.classes for made in _quantised(c, block))
    return replace(model, classes=classes)


def _quantised(c: TensorClass, block: int) -> Iterator[TensorClass]:
    if not c.is_linear:
        yield c
        return
    yield replace(c, dtype="float8_e4m3fn")
    dims = tuple(Dim(dim.meaning, -(-dim.size // block), block) for dim in c.dims)
    key, template = c.key + SCALE, c.template + SCALE
    yield replace(c, key=key, template=template, dims=dims, dtype="float32")
