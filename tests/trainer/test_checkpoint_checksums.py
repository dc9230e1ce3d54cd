"""A load looks at the bytes of what it reads, not at their number alone."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardloop.checkpoint import checkpoint_name, load_checkpoint, save_checkpoint
from shardloop.errors import CheckpointError

SHAPES = {"model.w": (300, 7), "optim.w.exp_avg": (300, 7), "optim.w.step": ()}


def make_state(generator: torch.Generator) -> dict[str, Tensor]:
    return {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}


def flip_a_bit(path: Path, tensor: Tensor, generator: torch.Generator) -> None:
    """Of the elements of `tensor`, in the file that has them."""
    elements = tensor.numpy().tobytes()
    bit = int(torch.randint(8 * len(elements), (), generator=generator))
    (file,) = [file for file in path.glob("*.distcp") if elements in file.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(elements) + bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


@pytest.mark.parametrize("key", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_one_flipped_bit_is_refused_with_the_tensor_and_the_file(
    seed: int, key: str, tmp_path, group
) -> None:
    generator = torch.Generator().manual_seed(seed)
    path = tmp_path / checkpoint_name(1)
    saved = make_state(generator)
    save_checkpoint(path, saved, version=1, extra={}, group=group)
    load_checkpoint(path, make_state(generator), group=group)
    flip_a_bit(path, saved[key], generator)
    found = rf"damaged \({key} in __0_0.distcp: .*its checksum differs"
    with pytest.raises(CheckpointError, match=found):
        load_checkpoint(path, make_state(generator), group=group)
