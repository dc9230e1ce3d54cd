"""Random batches for the tests of the trainer and for their ranks."""

import torch

from shardloop.rl.batch import Batch
from tests.models import VOCAB


def make_random_batch(
    *, num_rows: int = 7, seed: int = 0, temperature: float = 0.7, longest: int = 12
) -> Batch:
    """Rows of uneven lengths; the mask has holes and one row without any loss token."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    lengths = integers(3, longest + 1, num_rows)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    num_tokens = sum(lengths)
    loss_mask_N = torch.rand(num_tokens, generator=generator) < 0.6
    loss_mask_N[offsets[:-1]] = False
    loss_mask_N[offsets[1] : offsets[2]] = False

    def values() -> torch.Tensor:
        drawn = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
        return drawn.masked_fill(~loss_mask_N, 0.0)

    return Batch(
        token_ids_N=torch.tensor(integers(0, VOCAB, num_tokens)),
        offsets=offsets,
        loss_mask_N=loss_mask_N,
        advantages_N=values(),
        behave_N=values() - 3.0,
        old_N=values() - 3.0,
        ref_N=values() - 3.0,
        weights_N=values().exp().clamp(max=2.0).masked_fill(~loss_mask_N, 0.0),
        temperature=temperature,
    )
