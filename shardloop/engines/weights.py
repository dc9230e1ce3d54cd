"""An engine's tensors: filled from a state dict, checked, and without memory during a sleep.

Called by the local engine. Floor 2. What belongs where is said by the layout's own pieces.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from shardloop.errors import ModelError, ShardloopError
from shardloop.layout import Layout, box_of
from shardloop.layout.fit import shape_faults


def local_pairs(
    layout: Layout, rank: int, tensors: Mapping[str, Tensor], state_dict: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(view of a local tensor, its part of the state dict), for all that `rank` holds.

    Args:
        tensors: the local tensors of layout rank `rank`.
        state_dict: whole tensors by Hugging Face name. A tied head may be there too, equal to the
            embedding.
    Raises:
        ModelError: names or shapes that the model does not have, or lacks; all are listed. Nothing
            is yielded then.
    """
    _check_state_dict(layout, state_dict)
    for piece in layout.pieces(rank):
        local = piece.of(tensors)
        yield local, box_of(state_dict[piece.name], piece.box)


def free_memory(tensors: Mapping[str, Tensor]) -> None:
    """Give the memory of `tensors` back; they and their views stay, but cannot be read."""
    for tensor in tensors.values():
        tensor.untyped_storage().resize_(0)


def restore_memory(layout: Layout, rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Memory for all that has none: NaN where the layout has an element, 0 in its padding."""
    freed = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.untyped_storage().nbytes() < tensor.nbytes
    }
    for tensor in freed.values():
        tensor.untyped_storage().resize_(tensor.nbytes)
        tensor.zero_()
    for piece in layout.pieces(rank) if freed else ():
        if piece.local_name in freed:
            piece.of(freed).fill_(float("nan"))


def check_finite(tensors: Mapping[str, Tensor], error: type[ShardloopError], why: str) -> None:
    """Raises `error`, which names the tensors with elements that are not finite and says `why`."""
    broken = [name for name, tensor in tensors.items() if not all_finite(tensor)]
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        raise error(f"weights that are not finite: {', '.join(broken[:3])}{more}; {why}")


def all_finite(tensor: Tensor) -> bool:
    """True where no element is NaN or infinite. Both survive a sum, which is one quick pass."""
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    return bool(total.isfinite()) or bool(tensor.isfinite().all())


def _check_state_dict(layout: Layout, state_dict: Mapping[str, Tensor]) -> None:
    given = dict(state_dict)
    faults = []
    if layout.model.tied and "lm_head.weight" in given:
        head, embedding = given.pop("lm_head.weight"), given.get("model.embed_tokens.weight")
        if embedding is not None and not torch.equal(head, embedding):
            faults.append("lm_head.weight differs from the embedding it is tied to")
    faults += shape_faults(layout.model.tensor_shapes(), given)
    if faults:
        listed = "\n  ".join(faults)
        raise ModelError(
            f"the state dict does not fit this {layout.model.name} model ({len(faults)} faults):\n"
            f"  {listed}\npass the state dict of the model that config.json describes"
        )
