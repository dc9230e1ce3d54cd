"""Rewards that fail, for `--reward tests.cli.rewards:NAME`."""

from shardloop.types import Prompt


def returns_nan(prompt: Prompt, text: str, *, finished: bool) -> float:
    return float("nan")


def raises(prompt: Prompt, text: str, *, finished: bool) -> float:
    raise LookupError(f"no entry for {prompt.uid}")
