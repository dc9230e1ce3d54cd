"""The penalty near the token limit."""

import pytest
import torch

from shardloop.errors import UsageError
from shardloop.rl.overlong import overlong_penalty


def test_penalty_falls_in_a_straight_line_over_the_buffer() -> None:
    lengths = torch.tensor([0, 79, 80, 81, 85, 90, 99, 100])
    penalty = overlong_penalty(lengths, max_tokens=100, buffer=20)
    assert penalty.tolist() == pytest.approx([0, 0, 0, -0.05, -0.25, -0.5, -0.95, -1])


@pytest.mark.parametrize("buffer", [1, 3, 20])
def test_penalty_never_rises_with_length_and_stays_within_one(buffer: int) -> None:
    penalty_PG = overlong_penalty(torch.arange(24).view(2, 12), max_tokens=20, buffer=buffer)
    assert penalty_PG.shape == (2, 12)
    assert (penalty_PG.flatten().diff() <= 0).all()
    assert (penalty_PG.amin().item(), penalty_PG.amax().item()) == (-1.0, 0.0 if buffer < 20 else 0)


@pytest.mark.parametrize("buffer", [0, 11])
def test_a_buffer_outside_the_limit_is_refused(buffer: int) -> None:
    with pytest.raises(UsageError, match=f"buffer={buffer}; choose 1 to max_tokens=10"):
        overlong_penalty(torch.tensor([1]), max_tokens=10, buffer=buffer)
