"""Rewards that compare with a known answer: whole text, a line, the last number. Floor 1.

Named in `rewards.REWARDS`. All are 0 or 1, and text is compared or parsed, never evaluated.
"""

import re
from decimal import Decimal

from shardloop.errors import RewardError
from shardloop.types import Prompt

# A minus sign belongs to the number unless it follows one: `10-3` holds 10 and 3.
NUMBER = re.compile(r"(?:(?<![0-9.)])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")


def exact_reward(prompt: Prompt, text: str, *, finished: bool) -> float:
    """1 if the model ended its answer and the whole of it equals `prompt.answer`."""
    answer = _text_answer(prompt, "exact")
    return float(finished and text == answer)


def line_reward(prompt: Prompt, text: str, *, finished: bool) -> float:
    """1 if the first line equals `prompt.answer` and was ended, by a newline or by a stop token."""
    answer = _text_answer(prompt, "line")
    line, newline, _ = text.partition("\n")
    return float(bool(finished or newline) and line.strip() == answer)


def final_reward(prompt: Prompt, text: str, *, finished: bool) -> float:
    """1 if the answer was ended and its last line equals `prompt.answer`: the final word after any
    calls of a tool, whose answers end with a newline."""
    answer = _text_answer(prompt, "final")
    return float(finished and text.rpartition("\n")[2].strip() == answer)


def number_reward(prompt: Prompt, text: str, *, finished: bool) -> float:
    """1 if the model ended its answer and the last number in it equals `prompt.answer`.

    The answer is a number or its text; `1,000`, `1000` and `1000.0` are equal.
    """
    wanted = _last_number(str(prompt.answer))
    if wanted is None or isinstance(prompt.answer, bool):
        raise RewardError(
            f"reward number: {prompt.named} has answer={prompt.answer!r};"
            " it must be a number or text with one in it"
        )
    return float(finished and _last_number(text) == wanted)


def _text_answer(prompt: Prompt, reward: str) -> str:
    if not isinstance(prompt.answer, str):
        raise RewardError(
            f"reward {reward}: {prompt.named} has answer={prompt.answer!r}; it must be text"
        )
    return prompt.answer


def _last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
