"""Goals, printed beside what was measured. They judge nothing but the run that prints them."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    what: str
    value: float
    limit: float
    unit: str = ""
    at_least: bool = False
    """The value should reach the limit instead of staying below it."""

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        sign, verdict = ">=" if self.at_least else "<=", "met" if self.met else "NOT MET"
        return f"{self.what}: {self.value:,.4g}{self.unit}, goal {sign} {self.limit:g}: {verdict}"


def as_json(goals: Iterable[Goal]) -> list[dict[str, Any]]:
    return [asdict(goal) | {"met": goal.met, "text": str(goal)} for goal in goals]


def show(goals: Iterable[dict[str, Any]]) -> None:
    for goal in goals:
        print(f"  {goal['text']}")
