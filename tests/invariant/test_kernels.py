"""Each kernel gives a row the same bits whatever stands beside it, and the plain gradient."""

from functools import partial

import pytest
import torch
from torch import Tensor

from shardloop.invariant.attention import attention
from shardloop.invariant.rows import (
    elementwise,
    exact_logprobs,
    linear,
    rms_norm,
    row_sum,
    score,
    swiglu,
)

DTYPES = (torch.float32, torch.float64)
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def shifted(x: Tensor, offset: int) -> Tensor:
    """The same numbers in storage that begins `offset` elements after an aligned address."""
    return torch.cat([x.new_zeros(offset), x.flatten()])[offset:].view(x.shape)


def row_kernels(width: int, dtype: torch.dtype, generator: torch.Generator):
    """(name, function of [n, width], plain form) of every row kernel, with weights of its own."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    weight, bias, scale = random(48, width), random(48), random(width)
    ids = torch.randint(0, 48, (), generator=generator)

    def plain_norm(x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, (width,), scale, 1e-6)

    def logprobs(x: Tensor) -> Tensor:
        found = exact_logprobs(linear(x, weight, None), ids.expand(len(x)), x.new_tensor([0.7]))
        return torch.stack(found, -1)

    def scored(x: Tensor) -> Tensor:
        return torch.stack(score(x, weight, ids.expand(len(x)), temperature=0.7), -1)

    def plain_logprobs(x: Tensor) -> Tensor:
        table = torch.log_softmax(x @ weight.T / 0.7, -1)
        return torch.stack([table[:, ids], -(table * table.exp()).sum(-1)], -1)

    return {
        "linear": (lambda x: linear(x, weight, bias), lambda x: x @ weight.T + bias),
        "row_sum": (lambda x: row_sum(x)[:, None], lambda x: x.sum(-1, keepdim=True)),
        "rms_norm": (partial(rms_norm, weight_D=scale, eps=1e-6), plain_norm),
        "swiglu": (lambda x: swiglu(x, x + 1), lambda x: torch.nn.functional.silu(x) * (x + 1)),
        "exp": (partial(elementwise, torch.exp), torch.exp),
        "exact_logprobs": (logprobs, plain_logprobs),
        "score": (scored, plain_logprobs),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 31, 96, 257])
def test_a_row_has_the_same_bits_alone_and_among_others(seed, dtype, width) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, (kernel, plain) in row_kernels(width, dtype, generator).items():
        row = torch.randn(1, width, generator=generator, dtype=dtype)
        alone = kernel(row)
        torch.testing.assert_close(alone, plain(row), rtol=0, atol=TOLERANCE[dtype] * width)
        for num_rows in (2, 7, 48, 49, 130):
            place = int(torch.randint(0, num_rows, (), generator=generator))
            rows = 3 * torch.randn(num_rows, width, generator=generator, dtype=dtype)
            rows[place] = row[0]
            assert torch.equal(kernel(shifted(rows, place % 5))[place], alone[0]), (name, num_rows)


def random_attention(seed: int, dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 150, (5,), generator=generator).tolist()
    shape = (len(lengths), max(lengths))
    q, k, v = (
        torch.randn(*shape, count, head_dim, generator=generator, dtype=dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    places = torch.arange(shape[1])
    positions = torch.where(places < torch.tensor(lengths)[:, None], places, -1)
    return q, k.transpose(1, 2), v.transpose(1, 2), positions


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (3, 1, 20), (18, 1, 64)])
def test_attention_of_a_query_depends_on_its_own_earlier_keys_only(
    seed, dtype, heads, kv_heads, head_dim
) -> None:
    q, k, v, positions = random_attention(
        seed, dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim
    )
    together = attention(q, k, v, positions)
    for row, last in ((0, 0), (1, 10), (2, 63), (3, 64), (4, 140), (0, 70)):
        last = min(last, int(positions[row].max()))
        keys = slice(0, last + 1)
        one = slice(row, row + 1)
        for room in (0, 5, 80):
            # As a decoding step sees it: one query, room after its keys with anything in it.
            cache_k, cache_v = (
                torch.cat(
                    [x[one, :, keys], torch.full_like(x[one, :, :1], 7.0).repeat(1, 1, room, 1)], 2
                )
                for x in (k, v)
            )
            alone = attention(q[one, last : last + 1], cache_k, cache_v, torch.tensor([[last]]))
            assert torch.equal(alone[0, 0], together[row, last]), (row, last, room)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_equals_softmax_over_visible_keys(seed, dtype) -> None:
    q, k, v, positions = random_attention(seed, dtype, heads=4, kv_heads=2, head_dim=8)
    found = attention(q, k, v, positions)
    for row, last in positions.nonzero().tolist():
        if positions[row, last] < 0:
            assert not found[row, last].any()
            continue
        for head in range(4):
            scores = k[row, head // 2, : last + 1] @ q[row, last, head] / 8**0.5
            wanted = scores.softmax(0) @ v[row, head // 2, : last + 1]
            torch.testing.assert_close(
                found[row, last, head], wanted, rtol=0, atol=TOLERANCE[dtype]
            )


def test_gradients_are_those_of_the_values(seed) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    ids = torch.tensor([1, 0, 4])
    for kernel, inputs in (
        (linear, (random(3, 4), random(5, 4), random(5))),
        (partial(rms_norm, eps=1e-6), (random(3, 4), random(4))),
        (swiglu, (random(3, 4), random(3, 4))),
        (lambda x, w: score(x, w, ids, temperature=0.7), (random(3, 4), random(5, 4))),
        (
            lambda q, k, v: attention(q, k, v, torch.tensor([[0, 1, 2], [0, 1, -1]])),
            (random(2, 3, 4, 2), random(2, 2, 3, 2), random(2, 2, 3, 2)),
        ),
    ):
        assert torch.autograd.gradcheck(kernel, inputs)
