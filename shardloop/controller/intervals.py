"""How sure a measurement is: intervals over prompts and over seeds. Floor 4.

`reward_fields` is called where an evaluation is recorded (`controller.run`), the rest by the report
and the curve.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shardloop.metrics import Interval, wilson_interval

Record = Mapping[str, Any]

Z_95 = 1.96
# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def reward_fields(measure: str, rewards: Sequence[float]) -> dict[str, float | None]:
    """The part of an evaluation record that tells of one measure.

    That is its mean, and its sample std unless every reward is 0 or 1 (the mean then says it all);
    the std of a single reward is None.

    Raises:
        ValueError: no rewards.
    """
    if not rewards:
        raise ValueError(f"{measure}: no rewards to summarise; evaluate at least one prompt")
    fields: dict[str, float | None] = {measure: statistics.fmean(rewards)}
    if any(reward not in (0.0, 1.0) for reward in rewards):
        fields[f"{measure}_std"] = statistics.stdev(rewards) if len(rewards) > 1 else None
    return fields


def eval_interval(record: Record, measure: str) -> Interval | None:
    """95 % interval over the prompts: Wilson's for 0/1 rewards, else the normal one.

    None where the record does not have the measure.
    """
    if measure not in record:
        return None
    mean, num_prompts = float(record[measure]), int(record["prompts"])
    if f"{measure}_std" not in record:
        return wilson_interval(mean * num_prompts, num_prompts)
    std = record[f"{measure}_std"]
    half = math.inf if std is None else Z_95 * std / math.sqrt(num_prompts)
    return Interval(mean, mean - half, mean + half)


def t_interval(values: Sequence[float]) -> Interval:
    """95 % interval of the mean of a few independent runs, by Student's t.

    Raises:
        ValueError: fewer than two values have no spread.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} value; an interval over seeds needs 2 or more")
    quantile = T_95[min(len(values) - 1, len(T_95)) - 1]
    mean = statistics.fmean(values)
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def before_and_after(evals: Sequence[Record]) -> tuple[Record, Record] | None:
    """The evaluation of the policy that RL started from and the newest one; None without both."""
    start = [record for record in evals if record["step"] == 0]
    trained = [record for record in evals if record["step"] > 0]
    return (start[-1], trained[-1]) if start and trained else None
