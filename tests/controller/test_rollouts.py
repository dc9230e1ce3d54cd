"""Rows of worked solutions: the environment's part of them carries no loss."""

import pytest

from shardloop.controller.rollouts import solution_row
from shardloop.errors import TaskError, UsageError
from shardloop.rl.batch import sft_batch
from shardloop.tasks import load_task
from shardloop.types import Prompt
from tests.controller.test_episodes import (
    END,
    PairTokenizer,
    Parrot,
    Recording,
    play_one,
    sampler_of,
    script,
)


def test_a_solution_of_several_turns_is_the_episode_it_describes() -> None:
    prompt = Prompt(uid="u0", text="q", solution=("xa?", "b3", "y"))
    row = solution_row(prompt, PairTokenizer(), 60)
    played = play_one(sampler_of(Recording(script("xa?", "y|"))))
    assert row.prompt_ids == played.request.prompt_ids
    assert row.answer_ids == played.token_ids_T
    assert row.loss_mask == played.loss_mask_T


def test_an_environment_that_opens_follows_an_empty_turn() -> None:
    row = solution_row(Prompt(uid="u0", text="q", solution=("", "hi:", "x")), PairTokenizer(), 60)
    played = play_one(sampler_of(Recording(script("x|")), lambda prompt: Parrot("hi:")))
    assert row.prompt_ids + row.answer_ids == played.request.prompt_ids + played.token_ids_T
    assert row.loss_mask == (0, 0, 0, 1, 1)


def test_a_solution_of_one_text_is_learnt_whole() -> None:
    row = solution_row(Prompt(uid="u0", text="q", solution="xy"), PairTokenizer(), 60)
    assert (row.answer_ids, row.loss_mask) == ((ord("x"), ord("y"), END), (1, 1, 1))


@pytest.mark.parametrize("texts", [(), ("a?", "b")])
def test_a_solution_that_does_not_end_with_the_policy_is_refused(texts: tuple[str, ...]) -> None:
    with pytest.raises(TaskError, match=rf"prompt 'u0'.* has {len(texts)} texts; it must begin"):
        solution_row(Prompt(uid="u0", text="q", solution=texts), PairTokenizer(), 60)


def test_a_solution_holds_nothing_but_texts() -> None:
    with pytest.raises(TaskError, match=r"solution of prompt 'u0' .* holds 2; it must be text"):
        solution_row(Prompt(uid="u0", text="q", solution=("a", 2, "b")), PairTokenizer(), 60)  # type: ignore[arg-type]


def test_masked_solution_tokens_carry_no_loss() -> None:
    prompts = load_task("calculator").prompts("train", seed=0, start=0, count=20)
    rows = [solution_row(prompt, PairTokenizer(), 60) for prompt in prompts]
    pairs = [(row.prompt_ids, row.answer_ids) for row in rows]
    batch = sft_batch(pairs, loss_masks=[row.loss_mask for row in rows])
    learnt = [bool(m) for row in rows for m in ((0,) * len(row.prompt_ids) + row.loss_mask)]
    assert batch.loss_mask_N.tolist() == learnt
    assert batch.num_loss_tokens < sft_batch(pairs).num_loss_tokens
    with pytest.raises(UsageError, match=r"row 0 has 3 answer ids and a loss mask of 2"):
        sft_batch([((1,), (2, 3, 4))], loss_masks=[(1, 1)])
