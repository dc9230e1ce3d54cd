"""Whether this machine's kernels keep the promise of fixed shapes, by trial at start-up. Floor 2.

Called by the trainer and the engine before they take the invariant kernels; milliseconds for a
small model. Nothing in a library's documents promises it, and routines differ between processors.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from shardloop.errors import UsageError
from shardloop.invariant.attention import BLOCK, GROUP, ROWS, WIDTH_STEP
from shardloop.invariant.rows import LANES, SERIAL, TILE
from shardloop.model.config import DecoderConfig

Kernels = Literal["fast", "invariant"]
"""fast: torch's own, whose last bits depend on the batch; invariant: those of this package."""

PLACES = (0, 5, 11)
"""Where the row under trial stands in turn, from the start and from the end of its tile."""


def check_invariance(
    config: DecoderConfig, *, tp_size: int, dtype: torch.dtype, device: torch.device | str
) -> None:
    """Try every product shape of the model with a row in several places and storages.

    Raises:
        UsageError: tensor parallelism, a dtype below float32, or a result that depends on more
            than its row.
    """
    if tp_size != 1:
        raise UsageError(
            f"invariant kernels with tp={tp_size}: a sum over ranks has an order of its own, so"
            " trainer and engine would differ; choose tp=1, or leave zero-gap off"
        )
    if dtype not in (torch.float32, torch.float64):
        raise UsageError(
            f"invariant kernels in {str(dtype).removeprefix('torch.')}; choose float32 or float64"
        )
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype).to(device)

    for (num_batch, num_rows, num_in), num_out in sorted(_products(config)):
        weight = random(num_batch, num_out, num_in)
        if not _rows_are_apart(random(num_rows, num_in), weight):
            shape = f"[{num_batch}, {num_rows}, {num_in}] x [{num_in}, {num_out}]"
            raise _refusal(f"a product of {shape}", dtype, device)
    for fn in (torch.exp, torch.log, torch.cos, torch.sin):
        values = random(SERIAL).abs()
        parts = [fn(part) for part in values.split(LANES * 3)]
        if not torch.equal(fn(values), torch.cat(parts)):
            raise _refusal(fn.__name__, dtype, device)


def _products(config: DecoderConfig) -> Iterator[tuple[tuple[int, int, int], int]]:
    """((batch, rows, width in), width out) of every product a model makes."""
    width, head_dim = config.hidden_size, config.head_dim
    q_width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
    for num_in, num_out in {
        (width, q_width),
        (width, kv_width),
        (q_width, width),
        (width, config.intermediate_size),
        (config.intermediate_size, width),
        (width, config.vocab_size),
    }:
        yield (1, TILE, num_in), num_out
    padded = -(-head_dim // WIDTH_STEP) * WIDTH_STEP
    yield (GROUP, ROWS, padded), BLOCK
    yield (GROUP, ROWS, BLOCK), padded


def _rows_are_apart(row_rK: Tensor, weight_bNK: Tensor) -> bool:
    """One row's result is the same at the places of PLACES, beside others, in shifted storage."""
    num_batch = len(weight_bNK)
    shifted = torch.cat([weight_bNK.new_zeros(3), weight_bNK.flatten()])[3:].view_as(weight_bNK)
    first: Tensor | None = None
    for place in (*PLACES, *(-1 - place for place in PLACES)):
        x_bRK = row_rK.roll(place, 0).repeat(num_batch, 1, 1) * (1 + place)
        x_bRK[place % num_batch, place] = row_rK[0]
        storage = shifted if place % 2 else weight_bNK
        if num_batch == 1:
            out = torch.mm(x_bRK[0], storage[0].T)[place]
        else:
            # Every batch entry has the weight of the one under trial.
            everywhere = storage[:1].repeat(num_batch, 1, 1).transpose(1, 2)
            out = torch.bmm(x_bRK, everywhere)[place % num_batch, place]
        first = out if first is None else first
        if not torch.equal(out, first):
            return False
    return True


def _refusal(what: str, dtype: torch.dtype, device: torch.device | str) -> UsageError:
    return UsageError(
        f"on this machine ({device}, {str(dtype).removeprefix('torch.')}) {what} depends on what"
        " stands beside a row, so log-probs of trainer and engine cannot be equal bit for bit;"
        " leave zero-gap off"
    )
