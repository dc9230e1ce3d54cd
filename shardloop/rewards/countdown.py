"""The verifier of the countdown task: does this expression reach the target? Floor 1.

Named in `rewards.REWARDS`. Model text is parsed into a syntax tree of which only numbers, + - * /
and brackets are accepted, and that tree is computed with exact fractions: nothing is evaluated.
"""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from shardloop.errors import RewardError
from shardloop.types import Prompt

ALLOWED = re.compile(r"[0-9+\-*/() ]+")
MAX_CHARS = 64
OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def countdown_reward(prompt: Prompt, text: str, *, finished: bool) -> float:
    """1 if a finished expression uses each number exactly once and its value is the target.

    `prompt.answer` is {"numbers": [...], "target": ...}; RewardError where it is not.
    """
    numbers, target = _question(prompt)
    parsed = compute(text) if finished else None
    if parsed is None:
        return 0.0
    value, used = parsed
    return float(sorted(used) == sorted(numbers) and value == target)


def _question(prompt: Prompt) -> tuple[list[int], float]:
    match prompt.answer:
        case {"numbers": list(numbers), "target": int() | float() as target}:
            if all(isinstance(number, int) for number in numbers):
                return numbers, target
    raise RewardError(
        f"reward countdown: {prompt.named} has answer={prompt.answer!r};"
        ' it must be {"numbers": [whole numbers], "target": number}'
    )


def compute(text: str) -> tuple[Fraction, list[int]] | None:
    """Value of an arithmetic expression and the numbers in it, or None where it is none."""
    if len(text) > MAX_CHARS or not ALLOWED.fullmatch(text):
        return None
    used: list[int] = []

    def value_of(node: ast.expr) -> Fraction:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value_of(left), value_of(right))
            case ast.Constant(value=int(number)):
                used.append(number)
                return Fraction(number)
        raise SyntaxError(f"{type(node).__name__} is not arithmetic")

    try:
        return value_of(ast.parse(text.strip(), mode="eval").body), used
    except (SyntaxError, ZeroDivisionError):
        return None
