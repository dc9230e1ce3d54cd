"""What is said of a submission: the same for every runner. Called by all doors of the judge."""

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

VERSION = 1
"""Of the JSON; a number that rises when a field changes its meaning or goes."""


class Verdict(StrEnum):
    """Of a case, and of a submission."""

    AC = "AC"
    PA = "PA"
    WA = "WA"
    RE = "RE"
    TLE = "TLE"
    MLE = "MLE"
    OLE = "OLE"
    CE = "CE"
    RF = "RF"
    IE = "IE"

    @property
    def meaning(self) -> str:
        return MEANINGS[self]


MEANINGS = {
    Verdict.AC: "accepted",
    Verdict.PA: "partly accepted: some groups of cases passed",
    Verdict.WA: "wrong answer",
    Verdict.RE: "runtime error",
    Verdict.TLE: "too much CPU time",
    Verdict.MLE: "too much memory",
    Verdict.OLE: "too much output",
    Verdict.CE: "cannot be loaded: its syntax, or the function that is asked for",
    Verdict.RF: "a rule of the problem is broken",
    Verdict.IE: "the judge itself failed; this does not count",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """Of one case, in the order in which they ran."""

    name: str
    group: str
    verdict: Verdict
    """Not PA."""
    message: str = ""
    """What went wrong, in words, for the learner."""
    details: dict[str, Any] = field(default_factory=dict)
    """JSON values; what is known of: `inputs` (name to a short text), `rank`, `where` (of the
    output), `index`, `expected`, `got`, `max_abs_error`, `max_rel_error`, `line`, `traceback`,
    `log` (of the ranks)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Of one submission."""

    problem: int
    verdict: Verdict
    """PA where some groups with points have passed and others not; else that of the first case that
    failed, or of what happened before any ran."""
    points: int
    max_points: int
    seed: int
    """Makes the same cases again."""
    message: str = ""
    """For a verdict that no case has, or `IE`."""
    cases: tuple[CaseResult, ...] = ()
    trap: str | None = None
    """The name of a known mistake that this submission behaves like, case by case."""
    advice: str = ""
    """The text on that trap."""
    printed: str = ""
    cpu_s: float = 0.0
    wall_s: float = 0.0
    layer: str = ""
    """Of the sandbox."""

    @property
    def first_failure(self) -> CaseResult | None:
        return next((case for case in self.cases if case.verdict is not Verdict.AC), None)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values, with the version of their form."""
        return {"version": VERSION, **asdict(self)}
