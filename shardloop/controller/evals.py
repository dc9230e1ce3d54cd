"""Records of held-out evaluations: what a line of evals.jsonl says, and how sure it is. Floor 4.

`reward_fields` is called where an evaluation is recorded (`controller.run`, `shardloop eval`), the
rest by the report and the curve.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from shardloop.intervals import Z_95, Interval, wilson_interval

Record = Mapping[str, Any]
"""A line of metrics.jsonl or evals.jsonl."""


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


def before_and_after(evals: Sequence[Record]) -> tuple[Record, Record] | None:
    """The evaluation of the policy that RL started from and the newest one; None without both."""
    start = [record for record in evals if record["step"] == 0]
    trained = [record for record in evals if record["step"] > 0]
    return (start[-1], trained[-1]) if start and trained else None
