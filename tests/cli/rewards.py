"""Rewards that fail in a run, for `--reward tests.cli.rewards:NAME`.

Not on the empty completion on which a run tries them before it starts.
"""

from shardloop.types import Prompt


def returns_nan(prompt: Prompt, text: str, *, finished: bool) -> float:
    return float("nan") if text else 0.0


def raises(prompt: Prompt, text: str, *, finished: bool) -> float:
    if text:
        raise LookupError(f"no entry for {prompt.uid}")
    return 0.0
