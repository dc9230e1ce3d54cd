"""A reward that even an untrained model earns, for `--reward tests.controller.rewards:…`."""

from shardloop.types import Prompt


def share_of_digits(prompt: Prompt, text: str, *, finished: bool) -> float:
    return sum(character.isdigit() for character in text) / 10
