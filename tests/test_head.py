"""The fused head against plain log-softmax: values, gradients, memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardloop.errors import UsageError
from shardloop.head import token_logprobs

N, D, V = 13, 6, 17


def inputs(seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight with gradients, and targets."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).requires_grad_()

    return draw(N, D), draw(V, D), torch.randint(0, V, (N,), generator=generator)


def naive(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logprobs = (hidden @ weight.T / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


@pytest.mark.parametrize("chunk", [1, 5, 13, 100, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-5)])
def test_values_and_gradients_equal_plain_log_softmax(
    chunk: int | None, temperature: float, dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, targets = inputs(0, dtype)
    upstream = torch.randn(N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = naive(hidden, weight, targets, temperature)
    actual = token_logprobs(hidden, weight, targets, temperature=temperature, chunk=chunk)
    leaves = (hidden, weight)
    expected_grads = torch.autograd.grad((expected[0] * upstream.to(dtype)).sum(), leaves)
    actual_grads = torch.autograd.grad((actual[0] * upstream.to(dtype)).sum(), leaves)
    for ours, theirs in zip((*actual, *actual_grads), (*expected, *expected_grads), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_gradient_equals_finite_differences() -> None:
    hidden, weight, targets = inputs(2)

    def logprobs(hidden: Tensor, weight: Tensor) -> Tensor:
        return token_logprobs(hidden, weight, targets, temperature=0.7, chunk=4)[0]

    assert torch.autograd.gradcheck(logprobs, (hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_are_bit_equal_with_and_without_gradient(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(3, dtype)
    with_grad = token_logprobs(hidden, weight, targets, temperature=0.9, chunk=4)
    with torch.no_grad():
        without = token_logprobs(hidden, weight, targets, temperature=0.9, chunk=4)
    for ours, theirs in zip(with_grad, without, strict=True):
        assert torch.equal(ours, theirs)


def test_entropy_carries_no_gradient() -> None:
    hidden, weight, targets = inputs(4)
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=1.0)
    assert logprobs.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_tokens_give_the_weight_a_gradient_of_zeros(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(5, dtype)
    logprobs, entropy = token_logprobs(hidden[:0], weight, targets[:0], temperature=1.0)
    assert len(logprobs) == len(entropy) == 0
    logprobs.sum().backward()
    for leaf in (hidden, weight):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_bfloat16_gradient_is_summed_in_float32_over_chunks() -> None:
    # 512 equal contributions: adding them one by one in bfloat16 stops growing at 256 of them
    hidden = torch.ones(512, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(512, dtype=torch.int64)
    logprobs, _ = token_logprobs(hidden, weight, targets, temperature=1.0, chunk=1)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[256.0], [-256.0]]


@pytest.mark.parametrize("scale", [1e3, 1e4])
def test_large_logits_give_finite_values_and_gradients(scale: float) -> None:
    hidden, weight, targets = inputs(6, torch.float32)
    logprobs, entropy = token_logprobs(hidden * scale, weight, targets, temperature=1.0)
    grads = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert all(values.isfinite().all() for values in (logprobs, entropy, *grads))
    assert (logprobs <= 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.3, 0.07])
@pytest.mark.parametrize("common", [0.0, 25.0, 500.0])
def test_what_all_logits_have_in_common_costs_no_digits(common: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(8)
    # In steps of 1/64, so that both the logits and their differences are exact in float32.
    logits = torch.randint(-128, 128, (500, V), generator=generator) / 64 + common
    best = logits.argmax(-1)
    ours, _ = token_logprobs(logits, torch.eye(V), best, temperature=temperature)
    exact, _ = naive(logits.double(), torch.eye(V).double(), best, temperature)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-6, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Records the most elements of any tensor an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.num_elements = max(self.num_elements, value.numel())
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits_or_the_weight() -> None:
    num_tokens, width, vocab, chunk = 400, 8, 64, 16
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(0, vocab, (num_tokens,))
    largest = LargestTensor()
    with largest:
        logprobs, _ = token_logprobs(hidden, weight, targets, temperature=0.7, chunk=chunk)
        logprobs.sum().backward()
    allowed = max(chunk * vocab, num_tokens * width, vocab * width)
    assert largest.num_elements <= allowed < num_tokens * vocab / 4


def test_arguments_that_do_not_fit_are_refused() -> None:
    hidden, weight, targets = inputs(7)
    with pytest.raises(UsageError, match="do not fit"):
        token_logprobs(hidden[1:], weight, targets, temperature=1.0)
    with pytest.raises(UsageError, match="to one dtype"):
        token_logprobs(hidden, weight.float(), targets, temperature=1.0)
    with pytest.raises(UsageError, match="temperature=0"):
        token_logprobs(hidden, weight, targets, temperature=0.0)
    with pytest.raises(UsageError, match=r"temperature=1e-46; choose a finite value above 1e-38"):
        token_logprobs(hidden.float(), weight.float(), targets, temperature=1e-46)
    with pytest.raises(UsageError, match="with V > 0"):
        token_logprobs(hidden[:0], weight[:0], targets[:0], temperature=1.0)
    with pytest.raises(UsageError, match="chunk=0"):
        token_logprobs(hidden, weight, targets, temperature=1.0, chunk=0)
    with pytest.raises(UsageError, match=r"token ids must be in \[0, 17\)"):
        token_logprobs(hidden, weight, targets + 16, temperature=1.0)
