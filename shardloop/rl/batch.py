"""Batches of token sequences as flat tensors: from the controller to every trainer rank. Floor 1.

Shapes: B rows (prompt + completion) · N tokens of all rows · T tokens of one completion.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardloop.errors import UsageError
from shardloop.types import Completion

_VALUES = (torch.float32, torch.float64)
_DTYPES = {
    "token_ids_N": (torch.int64,),
    "offsets": (torch.int64,),
    "loss_mask_N": (torch.bool,),
    "advantages_N": _VALUES,
    "behave_N": _VALUES,
    "full_N": _VALUES,
    "old_N": _VALUES,
    "ref_N": _VALUES,
    "weights_N": _VALUES,
    "scale_N": _VALUES,
}
"""What each tensor of a batch may be: half precision would round a log-prob by up to 0.4 %."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Ragged rows, flattened. Row b is the slice `offsets[b]:offsets[b + 1]` of every tensor named
    `_N`.

    Per-token values are 0 outside `loss_mask_N`. A log-prob at index i is that of token i given the
    tokens before it in its row. `dataclasses.replace(batch, old_N=...)` fills in what is computed
    later.

    Raises:
        UsageError: offsets that do not cover the tokens, a tensor of another length or dtype, a
            loss on the first token of a row (nothing precedes it), a temperature that is not finite
            and above 0.
    """

    token_ids_N: Tensor
    """int64: prompt and completion of each row, exactly as given and as sampled."""
    offsets: Tensor
    """int64 [B + 1], from 0 to N."""
    loss_mask_N: Tensor
    """bool: True on the tokens to learn from (chosen by the policy, or the answer in supervised
    training)."""
    advantages_N: Tensor | None = None
    behave_N: Tensor | None = None
    """Log-prob under the distribution the engine sampled from (after top-p and top-k)."""
    full_N: Tensor | None = None
    """The engine's log-prob under its full distribution; equal to `behave_N` unless top-p or top-k
    cut it."""
    old_N: Tensor | None = None
    """Log-prob by the trainer before the first update on this batch."""
    ref_N: Tensor | None = None
    """Log-prob by the frozen reference policy."""
    weights_N: Tensor | None = None
    """Correction weights (see `shardloop.rl.correction`)."""
    scale_N: Tensor | None = None
    """Weight of each token's loss (see `shardloop.rl.aggregation`); None: the mean over tokens."""
    temperature: float = 1.0
    """Every log-prob above is taken at this temperature."""

    def __post_init__(self) -> None:
        for name, allowed in _DTYPES.items():
            values = getattr(self, name)
            if values is None:
                continue
            if values.dtype not in allowed:
                raise UsageError(
                    f"{name} is {values.dtype}; use {' or '.join(str(dtype) for dtype in allowed)}"
                )
            if name != "offsets" and values.shape != self.token_ids_N.shape:
                raise UsageError(
                    f"{name} has shape {tuple(values.shape)}; it needs one value per token: "
                    f"{tuple(self.token_ids_N.shape)}"
                )
        _check_offsets(self.offsets, num_tokens=len(self.token_ids_N))
        if bool(self.loss_mask_N[self.offsets[:-1]].any()):
            raise UsageError(
                "loss_mask_N is True on the first token of a row; "
                "nothing precedes it, so set it to False"
            )
        if not 0.0 < self.temperature < float("inf"):
            raise UsageError(
                f"temperature={self.temperature}; log-probs of a batch need a finite value above 0"
            )

    @property
    def num_loss_tokens(self) -> int:
        """Denominator of every metric per token, at any split into ranks and micro-batches."""
        return int(self.loss_mask_N.sum())

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, as `plan_packing` takes them."""
        lengths: list[int] = self.offsets.diff().tolist()
        return lengths


def make_batch(completions: Sequence[Completion], advantages: Tensor) -> Batch:
    """One row per completion, in order: its prompt, then its tokens as sampled.

    Args:
        completions: of one temperature; `loss_mask_T` says which tokens count.
        advantages: float32 or float64 [B], spread over the row's loss tokens. Its dtype becomes
            that of all values.
    Raises:
        UsageError: no completions, another number of advantages, mixed or zero temperatures, an
            empty prompt, or a value at a loss token that is not finite.
    """
    if not completions:
        raise UsageError("completions is empty; a batch needs at least one completion")
    if advantages.shape != (len(completions),) or advantages.dtype not in _VALUES:
        raise UsageError(
            f"advantages is {advantages.dtype} {tuple(advantages.shape)}; "
            f"pass one float per completion: float32 or float64 [{len(completions)}]"
        )
    temperatures = {completion.request.sampling.temperature for completion in completions}
    if len(temperatures) > 1 or 0.0 in temperatures:
        raise UsageError(
            f"completions were sampled at temperatures {sorted(temperatures)}; "
            "a batch takes one temperature above 0"
        )
    rows = [(completion.request.prompt_ids, completion.token_ids_T) for completion in completions]
    masks = [completion.loss_mask_T for completion in completions]
    token_ids_N, offsets, loss_mask_N = _flatten(rows, masks)

    def spread(values: Sequence[Sequence[float]]) -> Tensor:
        flat: list[float] = []
        for (prompt_ids, _), row in zip(rows, values, strict=True):
            flat += [0.0] * len(prompt_ids) + list(row)
        values_N = torch.tensor(flat, dtype=advantages.dtype).masked_fill(~loss_mask_N, 0.0)
        if not bool(values_N.isfinite().all()):
            raise UsageError(
                "a log-prob at a loss token is NaN or infinite; "
                "the engine must return finite log-probs"
            )
        return values_N

    if not bool(advantages.isfinite().all()):
        raise UsageError(
            f"advantages holds NaN or infinity: {advantages.tolist()}; check the rewards"
        )
    advantages_N = (
        advantages.detach().cpu().repeat_interleave(offsets.diff()).masked_fill(~loss_mask_N, 0.0)
    )
    return Batch(
        token_ids_N=token_ids_N,
        offsets=offsets,
        loss_mask_N=loss_mask_N,
        advantages_N=advantages_N,
        behave_N=spread([completion.behave_T for completion in completions]),
        full_N=spread([completion.full_T for completion in completions]),
        temperature=temperatures.pop(),
    )


def sft_batch(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    loss_masks: Sequence[Sequence[int]] | None = None,
) -> Batch:
    """Rows of (prompt ids, answer ids) for supervised training.

    Args:
        loss_masks: of each row, one entry for each answer id: 1 where the loss is. By default it is
            on every answer token.
    Raises:
        UsageError: no rows, an empty prompt, or a mask of another length than its answer.
    """
    if not rows:
        raise UsageError("rows is empty; a batch needs at least one (prompt_ids, answer_ids)")
    if loss_masks is None:
        loss_masks = [[1] * len(answer_ids) for _, answer_ids in rows]
    for index, ((_, answer_ids), mask) in enumerate(zip(rows, loss_masks, strict=True)):
        if len(mask) != len(answer_ids):
            raise UsageError(
                f"row {index} has {len(answer_ids)} answer ids and a loss mask of {len(mask)}; "
                "give one entry for each id"
            )
    token_ids_N, offsets, loss_mask_N = _flatten(rows, loss_masks)
    return Batch(token_ids_N=token_ids_N, offsets=offsets, loss_mask_N=loss_mask_N)


def _flatten(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]], masks: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, offsets and loss mask of (prompt ids, completion ids) rows; `masks` has one entry
    per completion id."""
    token_ids: list[int] = []
    loss_mask: list[bool] = []
    offsets = [0]
    for index, ((prompt_ids, completion_ids), mask) in enumerate(zip(rows, masks, strict=True)):
        if not prompt_ids:
            raise UsageError(
                f"row {index} has an empty prompt; "
                "give at least one token (such as begin-of-sequence)"
            )
        token_ids += [*prompt_ids, *completion_ids]
        loss_mask += [False] * len(prompt_ids) + [bool(entry) for entry in mask]
        offsets.append(len(token_ids))
    return (
        torch.tensor(token_ids, dtype=torch.int64),
        torch.tensor(offsets, dtype=torch.int64),
        torch.tensor(loss_mask, dtype=torch.bool),
    )


def _check_offsets(offsets: Tensor, *, num_tokens: int) -> None:
    """Offsets rise from 0 to num_tokens and no row is empty."""
    values = offsets.tolist()
    if (
        len(values) < 2
        or values[0] != 0
        or values[-1] != num_tokens
        or bool((offsets.diff() < 1).any())
    ):
        raise UsageError(
            f"offsets={values} over {num_tokens} tokens; "
            f"they must start at 0, end at {num_tokens} and rise by at least 1"
        )
