"""The fused head against plain log-softmax: values, gradients, memory, a cut vocabulary."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardloop import head
from shardloop.errors import UsageError
from shardloop.head import VocabShard, token_logprobs
from shardloop.model import SingleProcess, TensorParallel
from shardloop.parallel.context import RankContext
from shardloop.parallel.tp import ProcessGroupTP
from tests.engines.models import run_threads
from tests.harness import run_ranks

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


def upstream(seed: int) -> tuple[Tensor, Tensor]:
    """Gradients of a loss by log-probs and by entropies."""
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, N, generator=generator, dtype=torch.float64)
    return first, second


def gradients(values: tuple[Tensor, Tensor], leaves: tuple[Tensor, ...], seed: int) -> list[Tensor]:
    grads = tuple(grad.to(values[0].dtype) for grad in upstream(seed))
    return list(torch.autograd.grad(values, leaves, grads))


@pytest.mark.parametrize("tile", [1, 30, head.TILE])
@pytest.mark.parametrize("chunk", [1, 5, 13, 100, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-5)])
def test_values_and_gradients_equal_plain_log_softmax(
    tile: int,
    chunk: int | None,
    temperature: float,
    dtype: torch.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(head, "TILE", tile)
    hidden, weight, targets = inputs(0, dtype)
    expected = naive(hidden, weight, targets, temperature)
    actual = token_logprobs(hidden, weight, targets, temperature=temperature, chunk=chunk)
    expected_grads = gradients(expected, (hidden, weight), 1)
    actual_grads = gradients(actual, (hidden, weight), 1)
    for ours, theirs in zip((*actual, *actual_grads), (*expected, *expected_grads), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_gradients_equal_finite_differences() -> None:
    hidden, weight, targets = inputs(2)

    def values(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, weight, targets, temperature=0.7, chunk=4)

    assert torch.autograd.gradcheck(values, (hidden, weight))


@pytest.mark.parametrize("which", [0, 1])
def test_each_result_has_its_own_gradient(which: int) -> None:
    hidden, weight, targets = inputs(2)
    expected = naive(hidden, weight, targets, 0.7)[which].sum()
    actual = token_logprobs(hidden, weight, targets, temperature=0.7)[which].sum()
    torch.testing.assert_close(
        torch.autograd.grad(actual, (hidden, weight)),
        torch.autograd.grad(expected, (hidden, weight)),
        rtol=1e-13,
        atol=1e-13,
    )


def test_entropy_of_no_weight_changes_no_bit_and_costs_no_work() -> None:
    hidden, weight, targets = inputs(4)

    def cost_and_grads(entropy_coef: float | None) -> tuple[int, tuple[Tensor, ...]]:
        logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=0.7)
        loss = logprobs.sum()
        if entropy_coef is not None:
            loss = loss - entropy_coef * entropy.sum()
        seen = LargeResults(N * V)
        with seen:
            grads = torch.autograd.grad(loss, (hidden, weight))
        return seen.count, grads

    unused, expected = cost_and_grads(None)
    none_at_all, actual = cost_and_grads(0.0)
    assert none_at_all == unused < cost_and_grads(0.5)[0]
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_are_bit_equal_with_and_without_gradient(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(3, dtype)
    with_grad = token_logprobs(hidden, weight, targets, temperature=0.9, chunk=4)
    with torch.no_grad():
        without = token_logprobs(hidden, weight, targets, temperature=0.9, chunk=4)
    for ours, theirs in zip(with_grad, without, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_tokens_give_the_weight_a_gradient_of_zeros(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs(5, dtype)
    logprobs, entropy = token_logprobs(hidden[:0], weight, targets[:0], temperature=1.0)
    assert len(logprobs) == len(entropy) == 0
    (logprobs.sum() + entropy.sum()).backward()
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
    grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
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


class LargeResults(TorchDispatchMode):
    """Counts the operators that return a tensor of `num_elements`."""

    def __init__(self, num_elements: int) -> None:
        super().__init__()
        self.num_elements, self.count = num_elements, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += isinstance(result, Tensor) and result.numel() == self.num_elements
        return result


@pytest.mark.parametrize("tile", [100, head.TILE])
def test_no_tensor_is_larger_than_a_tile_or_the_gradients(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "TILE", tile)
    num_tokens, width, vocab, chunk = 400, 1, 64, 16
    hidden = torch.randn(num_tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(0, vocab, (num_tokens,))
    largest = LargestTensor()
    with largest:
        values = token_logprobs(hidden, weight, targets, temperature=0.7, chunk=chunk)
        sum(value.sum() for value in values).backward()
    # What is kept of every token: two results, their maximum, sum and mean, in pairs.
    assert largest.num_elements <= max(min(chunk * vocab, tile), 2 * num_tokens)


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
    with pytest.raises(UsageError, match="17 rows from id 1 do not lie in a vocabulary of 17"):
        vocab = VocabShard(tp=SingleProcess(), first_id=1, vocab_size=V)
        token_logprobs(hidden, weight, targets, temperature=1.0, vocab=vocab)


def cut_head(
    tp: TensorParallel, bounds: list[int], seed: int, scale: float = 1.0
) -> tuple[Tensor, ...]:
    """Values, gradient of hidden and of this rank's rows, ids [bounds[rank], bounds[rank + 1])."""
    hidden, weight, targets = inputs(seed)
    hidden = (scale * hidden).detach().requires_grad_()
    first, last = bounds[tp.rank], bounds[tp.rank + 1]
    rows = weight[first:last].detach().requires_grad_()
    vocab = VocabShard(tp=tp, first_id=first, vocab_size=V)
    values = token_logprobs(hidden, rows, targets, temperature=0.6, chunk=5, vocab=vocab)
    return (*(value.detach() for value in values), *gradients(values, (hidden, rows), seed))


def check_cut(ranks: list[tuple[Tensor, ...]], seed: int, scale: float = 1.0) -> None:
    """Every rank has the bits of the first, and they are those of the whole head up to rounding."""
    for results in ranks:
        assert all(map(torch.equal, results[:3], ranks[0][:3]))
    whole = cut_head(SingleProcess(), [0, V], seed, scale)
    for ours, theirs in zip(ranks[0][:3], whole[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    grad_weight = torch.cat([results[3] for results in ranks])
    torch.testing.assert_close(grad_weight, whole[3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bounds", [[0, 9, V], [0, 0, V], [0, 6, 12, V], [0, 5, 5, V, V]])
@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("tile", [20, head.TILE])
def test_head_does_not_depend_on_how_the_vocabulary_is_cut(
    bounds: list[int], scale: float, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "TILE", tile)
    ranks = run_threads(lambda tp: cut_head(tp, bounds, 9, scale), len(bounds) - 1)
    check_cut(ranks, 9, scale)


def cut_head_on_rank(context: RankContext, bounds: list[int]) -> tuple[Tensor, ...]:
    return cut_head(ProcessGroupTP(context.group("all")), bounds, 10)


def test_cut_head_on_gloo_ranks_equals_the_whole_head() -> None:
    check_cut(run_ranks(cut_head_on_rank, 2, [0, 9, V]), 10)
