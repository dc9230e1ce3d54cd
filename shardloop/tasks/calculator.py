"""Two operations with a calculator at hand: `37*4+86=` is answered by `234`. Floor 1.

Made by `tasks.load_task`. A turn that ends with `>` is a call, which the calculator answers by a
line: `37*4>` by `148`. It takes one operation a call, so an answer found by it needs two, in the
right order. A turn that the model ends by itself is the final answer:

    37*4+86=37*4>148⏎148+86>234⏎234

The tiny model cannot multiply in its head. Half of the worked solutions state the answer at once
all the same, so that a supervised start calls only sometimes and reinforcement has something to
find: that calling pays. The two ways to ask a question (`86+37*4=`) stand on one side of the split.
"""

import re
from functools import cache

from shardloop.tasks.base import FiniteTask, split_of, stable_hash
from shardloop.types import Observation, Prompt

CALL_ENDS = ">"
REFUSED = "#"
"""Answer to a call that is not one operation on two whole numbers."""
CALL = re.compile(r"([0-9]{1,9})([+*-])([0-9]{1,9})")

Question = tuple[int, int, int, bool]
"""Two factors, what is added to their product, and whether that comes first."""


@cache
def calculator_task() -> FiniteTask[Question]:
    """Every two-digit number times 2 to 9, plus a two-digit number, asked in both orders."""
    train: list[Question] = []
    test: list[Question] = []
    for a in range(10, 100):
        for b in range(2, 10):
            for c in range(10, 100):
                held_out = split_of(f"calculator/{a}*{b}+{c}") == "test"
                (test if held_out else train).extend([(a, b, c, False), (a, b, c, True)])
    return FiniteTask(
        name="calculator",
        default_reward="final",
        train=train,
        test=test,
        to_prompt=_prompt,
        stop_text=CALL_ENDS,
        env=lambda prompt: Calculator(),
    )


def _prompt(question: Question) -> Prompt:
    a, b, c, sum_first = question
    text = f"{c}+{a}*{b}=" if sum_first else f"{a}*{b}+{c}="
    product, answer = str(a * b), str(a * b + c)
    second_call = f"{c}+{product}" if sum_first else f"{product}+{c}"
    calls = (f"{a}*{b}{CALL_ENDS}", f"{product}\n", f"{second_call}{CALL_ENDS}", f"{answer}\n")
    at_once = stable_hash("solution", text) % 2 == 0
    return Prompt(
        uid=f"calculator/{text}",
        text=text,
        answer=answer,
        solution=answer if at_once else (*calls, answer),
    )


class Calculator:
    """`shardloop.types.Env`: answers calls until a turn is none."""

    def reset(self) -> str:
        return ""

    def step(self, text: str) -> Observation:
        # The token that holds the end of a call may hold more after it.
        call, ended, _ = text.partition(CALL_ENDS)
        if not ended:
            return Observation(text="", done=True)
        return Observation(text=f"{compute(call)}\n")


def compute(call: str) -> str:
    """`37*4` gives `148`: one of + - * between two whole numbers; `REFUSED` for anything else."""
    parsed = CALL.fullmatch(call)
    if parsed is None:
        return REFUSED
    left, right = int(parsed[1]), int(parsed[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[parsed[2]])
