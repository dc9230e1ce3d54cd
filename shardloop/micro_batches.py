"""Which micro-batches of a batch one rank runs, and which of them a loss needs. Floor 2.

Called by the trainer, for log-probs and for gradients alike: a sequence lies in the same
micro-batch both times, so that its log-probs are the same bits.

    rows with an advantage   ──plan──▶ micro-batches with signal
    rows without any         ──plan──▶ silent ones: for log-probs, and for a KL or entropy term

Shape letters: N tokens of the batch, B rows and T tokens of a micro-batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardloop.config import GRPOConfig
from shardloop.rl.batch import Batch
from shardloop.rl.packing import PackedRows, pack, plan_packing


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """This rank's part of every batch, and how it is packed."""

    place: int
    num_places: int
    row_tokens: int
    rows_per_micro_batch: int
    multiple: int
    """Rows are padded to a multiple of this many tokens."""

    def with_signal(self, batch: Batch) -> list[PackedRows]:
        """As many on every place, at least 1, perhaps without a token."""
        return list(self._packed(batch, ~silent_rows(batch)))

    def silent(self, batch: Batch) -> list[PackedRows]:
        """As many on every place, 0 where all rows have a signal."""
        rows_B = silent_rows(batch)
        return list(self._packed(batch, rows_B)) if bool(rows_B.any()) else []

    def _packed(self, batch: Batch, rows_B: Tensor) -> Iterator[PackedRows]:
        indices: list[int] = rows_B.nonzero().squeeze(1).tolist()
        lengths = batch.lengths
        packing = plan_packing(
            [lengths[index] for index in indices],
            row_tokens=self.row_tokens,
            rows_per_micro_batch=self.rows_per_micro_batch,
            num_ranks=self.num_places,
        )
        for chosen in packing.micro_batches(self.place):
            rows = [[indices[i] for i in row] for row in chosen]
            yield pad_rows(pack(batch, rows), multiple=self.multiple)


def silent_rows(batch: Batch) -> Tensor:
    """Bool [B]: rows without an advantage other than 0 on a loss token; none of them where there
    is no other row."""
    if batch.advantages_N is None:
        return torch.zeros(len(batch.lengths), dtype=torch.bool)
    has_signal_N = (batch.advantages_N != 0) & batch.loss_mask_N
    rows = torch.split(has_signal_N, batch.lengths)
    silent_B = torch.tensor([not bool(row_T.any()) for row_T in rows])
    return silent_B & ~silent_B.all()


def needs_silent_rows(loss: GRPOConfig | Literal["sft"]) -> bool:
    """Whether tokens without advantage add to the gradient."""
    if loss == "sft":
        return True
    return loss.entropy_coef > 0.0 or (loss.kl_coef > 0.0 and loss.kl_in == "loss")


def without_silent_rows(batch: Batch) -> Batch:
    """The batch with its silent rows outside the loss mask: means over loss tokens are then over
    the others, while the weight of each token's loss stays that in the whole batch."""
    scale_N = batch.scale_N
    if scale_N is None:
        scale_N = torch.full(
            batch.loss_mask_N.shape, 1.0 / max(1, batch.num_loss_tokens), dtype=torch.float64
        )
    silent_N = silent_rows(batch).repeat_interleave(batch.offsets.diff())
    return replace(batch, loss_mask_N=batch.loss_mask_N & ~silent_N, scale_N=scale_N)


def pad_rows(packed: PackedRows, *, multiple: int) -> PackedRows:
    """Lengthens every row by padding to the next multiple of so many tokens."""
    width = packed.input_ids_BT.shape[1]
    missing = -width % multiple
    if not missing:
        return packed
    row_n = packed.target_positions_n // width
    return replace(
        packed,
        input_ids_BT=F.pad(packed.input_ids_BT, (0, missing)),
        position_ids_BT=F.pad(packed.position_ids_BT, (0, missing)),
        segment_ids_BT=F.pad(packed.segment_ids_BT, (0, missing), value=-1),
        target_positions_n=packed.target_positions_n + row_n * missing,
    )
