"""Batches: the tokens trained are the tokens sampled, and nothing else carries a value."""

import dataclasses

import pytest
import torch

from shardloop.errors import UsageError
from shardloop.rl.batch import Batch, make_batch, sft_batch
from shardloop.types import Completion, Request, SampleId, Sampling


def completion(
    prompt_ids: tuple[int, ...],
    token_ids: tuple[int, ...],
    *,
    loss_mask: tuple[int, ...] | None = None,
    behave: tuple[float, ...] | None = None,
    temperature: float = 1.0,
) -> Completion:
    size = len(token_ids)
    return Completion(
        request=Request(
            prompt_ids=prompt_ids,
            sampling=Sampling(max_tokens=8, temperature=temperature),
            sample_id=SampleId(prompt_uid="p", index=0),
            seed=0,
        ),
        token_ids_T=token_ids,
        behave_T=behave or tuple(-0.5 - token for token in range(size)),
        full_T=tuple(-1.5 - token for token in range(size)),
        version_T=(0,) * size,
        loss_mask_T=loss_mask or (1,) * size,
        finish_reason="stop",
    )


def test_rows_hold_prompt_and_completion_as_they_were_sampled() -> None:
    # token 2 is the end and 0 would be padding: neither is guessed from its id
    rows = [completion((7, 0, 2), (5, 6, 0, 2)), completion((2,), (2, 2))]
    batch = make_batch(rows, torch.tensor([0.5, -1.0]))
    assert batch.token_ids_N.tolist() == [7, 0, 2, 5, 6, 0, 2, 2, 2, 2]
    assert batch.offsets.tolist() == [0, 7, 10]
    assert batch.loss_mask_N.tolist() == [False] * 3 + [True] * 4 + [False] + [True] * 2
    assert (batch.lengths, batch.num_loss_tokens) == ([7, 3], 6)


def test_trained_ids_are_the_sampled_ones_where_their_text_has_others() -> None:
    pieces = {"hello": 3, "he": 1, "llo": 2}
    sampled = (pieces["he"], pieces["llo"])
    text = "".join(piece for id_ in sampled for piece in pieces if pieces[piece] == id_)
    assert pieces[text] == 3, "encoded again, the text is one token"
    batch = make_batch([completion((7,), sampled)], torch.zeros(1))
    assert batch.token_ids_N[batch.loss_mask_N].tolist() == [1, 2]
    assert batch.full_N is not None
    assert batch.full_N[batch.loss_mask_N].tolist() == [-1.5, -2.5]


def test_a_log_prob_that_is_missing_is_not_made_up() -> None:
    with pytest.raises(ValueError, match=r"lengths differ.*'behave_T': 1"):
        completion((7,), (5, 6), behave=(-0.5,))


def test_values_lie_on_loss_tokens_and_are_zero_elsewhere() -> None:
    rows = [completion((7,), (5, 6, 8), loss_mask=(1, 0, 1)), completion((1,), (2,))]
    batch = make_batch(rows, torch.tensor([0.5, -1.0], dtype=torch.float64))
    expected = {
        "advantages_N": [0.0, 0.5, 0.0, 0.5, 0.0, -1.0],
        "behave_N": [0.0, -0.5, 0.0, -2.5, 0.0, -0.5],
        "full_N": [0.0, -1.5, 0.0, -3.5, 0.0, -1.5],
    }
    for name, values in expected.items():
        assert getattr(batch, name).tolist() == values
        assert getattr(batch, name).dtype == torch.float64
    assert batch.num_loss_tokens == 3


def test_a_value_that_is_not_finite_matters_only_on_a_loss_token() -> None:
    inf = float("-inf")
    tool_output = completion((7,), (5, 6), loss_mask=(1, 0), behave=(-0.5, inf))
    assert make_batch([tool_output], torch.zeros(1)).behave_N is not None
    with pytest.raises(UsageError, match="finite log-probs"):
        make_batch([completion((7,), (5, 6), behave=(-0.5, inf))], torch.zeros(1))
    with pytest.raises(UsageError, match="advantages holds NaN"):
        make_batch([completion((7,), (5, 6))], torch.tensor([torch.nan]))


def test_an_answer_is_trained_and_its_question_is_not() -> None:
    batch = sft_batch([([1, 2], [3]), ([4], [5, 6])])
    assert batch.token_ids_N[batch.loss_mask_N].tolist() == [3, 5, 6]
    assert batch.advantages_N is None


def test_temperature_is_the_one_of_the_samples() -> None:
    rows = [completion((1,), (2,), temperature=0.6)]
    assert make_batch(rows, torch.zeros(1)).temperature == 0.6
    with pytest.raises(UsageError, match=r"temperatures \[0.6, 1.0\]"):
        make_batch([*rows, completion((1,), (2,))], torch.zeros(2))
    with pytest.raises(UsageError, match="one temperature above 0"):
        make_batch([completion((1,), (2,), temperature=0.0)], torch.zeros(1))


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(UsageError, match="completions is empty"):
        make_batch([], torch.zeros(0))
    with pytest.raises(UsageError, match="rows is empty"):
        sft_batch([])
    with pytest.raises(UsageError, match="row 0 has an empty prompt"):
        make_batch([completion((), (2,))], torch.zeros(1))
    with pytest.raises(UsageError, match="one float per completion"):
        make_batch([completion((1,), (2,))], torch.zeros(2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_advantages_are_float32_or_float64(dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match=f"advantages is {dtype}.*float32 or float64"):
        make_batch([completion((1,), (2,))], torch.zeros(1, dtype=dtype))


@pytest.mark.parametrize(
    ("name", "dtype", "allowed"),
    [
        ("token_ids_N", torch.int32, "torch.int64"),
        ("offsets", torch.int32, "torch.int64"),
        ("loss_mask_N", torch.int64, "torch.bool"),
        ("old_N", torch.bfloat16, "torch.float32 or torch.float64"),
        ("weights_N", torch.int64, "torch.float32 or torch.float64"),
        ("scale_N", torch.float16, "torch.float32 or torch.float64"),
    ],
)
def test_fields_of_another_dtype_are_refused(name: str, dtype: torch.dtype, allowed: str) -> None:
    batch = sft_batch([([1, 2], [3])])
    zeros_N = torch.zeros(3)
    batch = dataclasses.replace(batch, old_N=zeros_N, weights_N=zeros_N, scale_N=zeros_N)
    changed = getattr(batch, name).to(dtype)
    with pytest.raises(UsageError, match=f"{name} is {dtype}; use {allowed}$"):
        dataclasses.replace(batch, **{name: changed})


def test_inconsistent_fields_are_refused() -> None:
    batch = sft_batch([([1, 2], [3])])
    with pytest.raises(UsageError, match="old_N has shape"):
        dataclasses.replace(batch, old_N=torch.zeros(2))
    with pytest.raises(UsageError, match="first token of a row"):
        dataclasses.replace(batch, loss_mask_N=torch.tensor([True, False, True]))
    for offsets in ([0, 2], [1, 3], [0, 3, 3], [0]):
        with pytest.raises(UsageError, match="they must start at 0"):
            dataclasses.replace(batch, offsets=torch.tensor(offsets))
    with pytest.raises(UsageError, match="temperature=0"):
        Batch(
            token_ids_N=batch.token_ids_N,
            offsets=batch.offsets,
            loss_mask_N=batch.loss_mask_N,
            temperature=0.0,
        )
