"""Rows for supervised steps: the loss is on the whole answer, and both fit the context."""

import pytest

from shardloop.controller.sft import solution_row
from shardloop.errors import TaskError
from shardloop.types import Prompt
from tests.controller.fakes import STOP, LetterTokenizer

PROMPT = Prompt(uid="u", text="12", solution="333")


def test_an_answer_is_its_solution_and_the_stop_token() -> None:
    assert solution_row(PROMPT, LetterTokenizer(), 6) == ((2, 3), [4, 4, 4, STOP])


def test_a_solution_that_does_not_fit_the_context_is_named() -> None:
    with pytest.raises(TaskError, match=r"prompt 'u' has 2 tokens.*=4 .*context of 5"):
        solution_row(PROMPT, LetterTokenizer(), 5)


def test_a_prompt_without_a_solution_is_named() -> None:
    with pytest.raises(TaskError, match="prompt 'u' has no worked solution"):
        solution_row(Prompt(uid="u", text="1"), LetterTokenizer(), 6)
