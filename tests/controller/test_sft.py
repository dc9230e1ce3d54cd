"""Rows for supervised steps: the loss is on the whole answer, and both fit the context."""

from pathlib import Path

import pytest

from shardloop.config import SFTConfig, TrainerConfig
from shardloop.controller.events import Progress
from shardloop.controller.rollouts import solution_row
from shardloop.controller.sft import warm_start
from shardloop.errors import Interrupted, TaskError
from shardloop.tasks import load_task
from shardloop.types import Prompt
from tests.controller.fakes import STOP, LetterTokenizer

PROMPT = Prompt(uid="u", text="12", solution="333")


def test_an_answer_is_its_solution_and_the_stop_token() -> None:
    row = solution_row(PROMPT, LetterTokenizer(), 6)
    assert (row.prompt_ids, row.answer_ids) == ((2, 3), (4, 4, 4, STOP))
    assert row.loss_mask == (1, 1, 1, 1)


def test_a_solution_that_does_not_fit_the_context_is_named() -> None:
    with pytest.raises(TaskError, match=r"prompt 'u'.* has 2 tokens.* of 4 .*context of 5"):
        solution_row(PROMPT, LetterTokenizer(), 5)


def test_a_prompt_without_a_solution_is_named() -> None:
    with pytest.raises(TaskError, match=r"prompt 'u'.* has no worked solution"):
        solution_row(Prompt(uid="u", text="1"), LetterTokenizer(), 6)


class AnyText(LetterTokenizer):
    def encode(self, text: str) -> list[int]:
        return [1] * len(text)


class Ranks:
    """Workers whose group of trainers only answers."""

    def spawn(self, key: str, *_: object, **__: object) -> "Ranks":
        return self

    def call(self, method: str, *_: object, **__: object) -> dict[str, float]:
        assert method != "export", "a start that is not whole is never written"
        return {"loss": 1.0}


def test_a_stopped_supervised_start_says_that_it_begins_anew(tmp_path: Path) -> None:
    steps = warm_start(
        Ranks(),  # type: ignore[arg-type]
        task=load_task("sort"),
        tokenizer=AnyText(),
        model_dir=tmp_path,
        context_length=64,
        trainer=TrainerConfig(),
        sft=SFTConfig(steps=3, batch_size=2),
        seed=0,
        start=tmp_path / "start",
        stop_requested=lambda: True,
    )
    assert isinstance(next(steps), Progress)
    with pytest.raises(Interrupted, match=r"SFT step 1 of 3.* from its first step"):
        next(steps)
