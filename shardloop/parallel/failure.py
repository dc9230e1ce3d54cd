"""An exception of a rank, in a form that always crosses the process boundary. Floor 3.

Made by `parallel.worker`, read by `controller.faults`.
"""

import pickle
import time
import traceback
from dataclasses import dataclass
from typing import Any

from shardloop.errors import ShardloopError
from shardloop.parallel.agree import tells_of_another_rank


@dataclass(frozen=True, kw_only=True)
class Failure:
    error: ShardloopError | None
    """The exception itself where it is one of ours."""
    summary: str
    traceback: str
    is_echo: bool
    """It only reports that another rank failed, went away or did not come."""
    at_s: float
    """`time.monotonic()` when it was caught; comparable between processes of one machine."""


def describe(error: BaseException) -> Failure:
    """A `Failure` of this moment from an exception that was just caught."""
    return Failure(
        error=error if isinstance(error, ShardloopError) and _pickles(error) else None,
        summary=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        is_echo=_is_echo(error),
        at_s=time.monotonic(),
    )


def _is_echo(error: BaseException) -> bool:
    return any(tells_of_another_rank(part) for part in _chain(error))


def _chain(error: BaseException) -> list[BaseException]:
    """The error, what caused it, and what was being handled when it was raised."""
    chain = [error]
    for part in chain:
        links = (part.__cause__, part.__context__)
        chain += [link for link in links if link is not None and link not in chain]
    return chain


def _pickles(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value, protocol=5))
    except Exception:  # whatever its own reduce method raises; the summary is sent instead
        return False
    return True
