"""Equality of mathematical expressions, LaTeX included. Floor 1.

Named in `rewards.REWARDS`; needs the extra `shardloop[math]`.
"""

import logging
import threading
from typing import Any

from shardloop.errors import RewardError, UsageError, how_to_install
from shardloop.types import Prompt

TIME_LIMIT_S = 5
"""Text that takes longer to parse or compare earns nothing."""


def math_reward(prompt: Prompt, text: str, *, finished: bool) -> float:
    """1 if a finished answer holds an expression equal to `prompt.answer`; `\\boxed{}` goes first.

    Raises:
        UsageError: the extra is not installed.
        RewardError: `prompt.answer` itself cannot be parsed.
    """
    parse, verify = _math_verify()
    # The library limits time by a signal, which only the main thread can receive.
    limit_s = TIME_LIMIT_S if threading.current_thread() is threading.main_thread() else None
    candidates = (str(prompt.answer), f"${prompt.answer}$")
    wanted = next(filter(None, (parse(c, parsing_timeout=limit_s) for c in candidates)), None)
    if not wanted:
        raise RewardError(
            f"reward math: {prompt.named} has answer={prompt.answer!r};"
            " it must be a number or an expression"
        )
    if not finished:
        return 0.0
    found = parse(text, parsing_timeout=limit_s)
    return float(verify(wanted, found, timeout_seconds=limit_s))


def _math_verify() -> tuple[Any, Any]:
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise UsageError(f"reward math: {error}; {how_to_install('math')}") from error
    # It warns at every call without a time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse, verify
