"""Which part of a whole state dict goes where in an engine's tensors, by the layout's own pieces.

Called by the local engine. Floor 2.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from shardloop.errors import ModelError
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
        local = box_of(tensors[piece.local_name], piece.local_box)
        yield local, box_of(state_dict[piece.name], piece.box)


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
