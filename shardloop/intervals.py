"""How sure a measurement is: 95 % intervals of a proportion and of a mean over a few runs.

Called by `controller.evals` and the report. Floor 0.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.96
"""Two-sided 95 % quantile of the normal distribution."""
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Those of Student's t for 1 to 30 degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Interval:
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def wilson_interval(successes: float, trials: int) -> Interval:
    """Interval of a proportion (Wilson 1927, score interval).

    Raises:
        ValueError: no trials, or successes outside [0, trials].
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"successes={successes} of trials={trials}; need 0 <= successes <= trials")
    z = Z_95
    p = successes / trials
    spread = 1 + z * z / trials
    centre = (p + z * z / (2 * trials)) / spread
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / spread
    return Interval(p, max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half)))


def t_interval(values: Sequence[float]) -> Interval:
    """Interval of the mean of a few independent runs, by Student's t.

    Raises:
        ValueError: fewer than two values have no spread.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} value; an interval over seeds needs 2 or more")
    quantile = T_95[min(len(values) - 1, len(T_95)) - 1]
    mean = statistics.fmean(values)
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)
