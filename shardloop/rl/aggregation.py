"""How the losses of tokens become one number: a weight for each token. Floor 1; called by the loop.

The weights are those of the WHOLE batch, made once before it is dealt to ranks and micro-batches.
The loss is then a plain sum, and no split can change it.

Shapes: B rows · N tokens of all rows.
"""

import torch
from torch import Tensor

from shardloop.config import Aggregation
from shardloop.errors import UsageError


def token_scales(
    kind: Aggregation,
    *,
    mask_N: Tensor,
    offsets: Tensor,
    group_B: Tensor,
    constant: int | None,
) -> Tensor:
    """Weights with which Σ scale_N loss_N is, over n loss tokens of which n_b are of row b,

        "token-mean"      1 / n                          every token counts the same (DAPO)
        "sequence-mean"   1 / (rows × n_b)               every row counts the same (GRPO)
        "prompt-mean"     1 / (prompts × its tokens)     every prompt counts the same
        "sequence-sum"    1 / (rows × constant)          rows are summed (Dr. GRPO)

    Rows and prompts without any loss token are not counted.

    Two rows of 1 and 3 tokens with ratio 1 and advantages +1 and -1 (token losses -1 and +1):
    token-mean 0.5, sequence-mean 0, prompt-mean 0.5 (0 where each row has its own prompt),
    sequence-sum with constant 4: 0.25. Taken per micro-batch of one row and then averaged, the
    token mean would be 0.

    Args:
        mask_N: bool, the loss tokens.
        offsets: int64 [B + 1], as in `Batch`.
        group_B: int64, which prompt each row belongs to: any numbers, equal for rows of one prompt.
        constant: what "sequence-sum" divides each row's sum by, such as the most tokens of a
            completion; None for the others.
    Returns:
        float64 [N], 0 outside the mask. All 0 where there is no loss token.
    Raises:
        UsageError: an unknown kind, a constant missing, below 1 or of no use, shapes that differ.
    """
    if kind not in ("token-mean", "sequence-mean", "sequence-sum", "prompt-mean"):
        raise UsageError(
            f"kind={kind!r}; choose token-mean, sequence-mean, sequence-sum or prompt-mean"
        )
    if (constant is None) == (kind == "sequence-sum") or (constant is not None and constant < 1):
        raise UsageError(
            f"constant={constant} with kind={kind!r}; sequence-sum needs 1 or more, others None"
        )
    if len(group_B) != len(offsets) - 1 or int(offsets[-1]) != len(mask_N):
        raise UsageError(
            f"{len(group_B)} groups, {len(offsets) - 1} rows, offsets to {int(offsets[-1])}, "
            f"{len(mask_N)} mask entries; pass one group per row and one mask entry per token"
        )
    scales_N = torch.zeros(len(mask_N), dtype=torch.float64, device=mask_N.device)
    if not bool(mask_N.any()):
        return scales_N
    rows_B = torch.arange(len(group_B), device=mask_N.device)
    row_n = rows_B.repeat_interleave(offsets.diff())[mask_N]
    if kind == "token-mean":
        scales_N[mask_N] = 1.0 / len(row_n)
    elif kind == "sequence-sum":
        assert constant is not None
        scales_N[mask_N] = 1.0 / (constant * len(row_n.unique()))
    else:
        unit_n = row_n if kind == "sequence-mean" else group_B[row_n]
        _, place_n, counts = unit_n.unique(return_inverse=True, return_counts=True)
        scales_N[mask_N] = 1.0 / (len(counts) * counts[place_n].double())
    return scales_N
