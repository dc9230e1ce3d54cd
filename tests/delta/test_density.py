"""The predicted density against real steps of Adam and against neighbours found by bits."""

import pytest
import torch
from torch import nn

from shardloop.delta.density import predicted_density


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_probability_is_the_step_over_the_distance_of_neighbours(
    dtype: torch.dtype, seed: int
) -> None:
    """Random numbers, normal and subnormal, of either sign: the distance read off their bits."""
    size = torch.finfo(dtype).smallest_normal * 2.0 ** torch.randint(-2, 6, (500,))
    master = size * (1 + torch.rand(500)) * torch.randn(500).sign()
    integer = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    down = master.to(dtype).abs()
    down = torch.where(down.float() > master.abs(), _next(down, integer, -1), down)
    ulp = (_next(down, integer, 1).float() - down.float()).double()
    for share in (0.0, 0.3, 2.0):
        step = (share * ulp).float()
        found = predicted_density(master, -step, dtype=dtype)
        assert found.mean == pytest.approx(min(1.0, share), rel=1e-5)


def _next(values: torch.Tensor, integer: torch.dtype, count: int) -> torch.Tensor:
    return (values.view(integer) + count).view(values.dtype)


@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4])
def test_density_of_adam_steps_is_the_predicted_one(lr: float, seed: int) -> None:
    """Within five standard deviations of the count and 1 % for what is not uniform in an ulp."""
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.Tanh(), nn.Linear(256, 64))
    weights = [layer.weight for layer in model if isinstance(layer, nn.Linear)]
    for weight in weights:
        nn.init.normal_(weight, std=0.02)
    adam = torch.optim.AdamW(model.parameters(), lr=lr)
    for _ in range(5):
        before = torch.cat([weight.detach().flatten() for weight in weights])
        adam.zero_grad()
        model(torch.randn(16, 128)).square().mean().backward()
        adam.step()
        after = torch.cat([weight.detach().flatten() for weight in weights])
        changed = before.bfloat16() != after.bfloat16()
        measured = float(changed.double().mean())
        predicted = predicted_density(before, after - before, dtype=torch.bfloat16)
        tolerance = 5 * predicted.std + 0.01 * predicted.mean
        assert abs(measured - predicted.mean) < tolerance, (measured, predicted)
