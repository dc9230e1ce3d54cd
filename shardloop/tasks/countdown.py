"""Reach a number from three others: `3,5,2:16=` is answered by `(3+5)*2`, or another way. Floor 1.

Made by `tasks.load_task`. Many answers are right and only a verifier can tell which
(`rewards.countdown`): no label defines success. The order of the three numbers makes no new
question, so all orders of a question stand on the same side of the split.
"""

import operator
from functools import cache
from itertools import permutations

from shardloop.tasks.base import FiniteTask, split_of, stable_hash
from shardloop.types import Prompt

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
MAX_NUMBER = 9
MAX_TARGET = 50

Question = tuple[tuple[int, int, int], int]


@cache
def countdown_task() -> FiniteTask[Question]:
    """Every (three numbers of 1 to 9, reachable target of 1 to 50), in every order of the three."""
    train: list[Question] = []
    test: list[Question] = []
    digits = range(1, MAX_NUMBER + 1)
    for numbers in [(a, b, c) for a in digits for b in range(a, 10) for c in range(b, 10)]:
        for target in sorted(_ways(numbers)):
            held_out = split_of(f"countdown/{numbers}/{target}") == "test"
            orders = sorted({(x, y, z) for x, y, z in permutations(numbers)})
            (test if held_out else train).extend((order, target) for order in orders)
    return FiniteTask(
        name="countdown", default_reward="countdown", train=train, test=test, to_prompt=_prompt
    )


def _prompt(question: Question) -> Prompt:
    numbers, target = question
    text = f"{','.join(map(str, numbers))}:{target}="
    ways = _ways(tuple(sorted(numbers)))[target]
    return Prompt(
        uid=f"countdown/{text}",
        text=text,
        answer={"numbers": list(numbers), "target": target},
        solution=ways[stable_hash("solution", text) % len(ways)],
    )


@cache
def _ways(numbers: tuple[int, ...]) -> dict[int, tuple[str, ...]]:
    """Targets that `numbers` reach, each with the expressions that reach it."""
    found: dict[int, set[str]] = {}
    for a, b, c in set(permutations(numbers)):
        for first, inner in OPERATIONS.items():
            for second, outer in OPERATIONS.items():
                # `a+b*c` would bind the other way.
                head = f"{a}{first}{b}" if first == "*" or second != "*" else f"({a}{first}{b})"
                value = outer(inner(a, b), c)
                if 1 <= value <= MAX_TARGET:
                    found.setdefault(value, set()).add(f"{head}{second}{c}")
    return {target: tuple(sorted(ways)) for target, ways in found.items()}
