"""Whether an engine may run: which weights it has, and whether it updates or sleeps.

Held by every engine. Floor 2.

    fresh ──begin_update──▶ updating ──commit_update──▶ ready ──begin_update──▶ updating …
                                                          │
                                                     step, generate

    ready ──sleep("cache")────▶ asleep, cache freed ───────────wake──▶ ready
    ready ──sleep("weights")──▶ asleep, cache and weights freed ─wake─▶ emptied ──an update──▶ ready
                                   │
                                   └─an update─▶ asleep, cache freed

    updating, nothing written yet ──cancel_update──▶ as before: with the old weights, or without any
    updating, after another update that was not committed ──cancel_update──▶ updating

Only a ready engine runs. Requests may be submitted, aborted and resumed at any time; those in
flight survive an update and a sleep, and each token says in version_T which weights made it. A
sleeping engine takes an update without waking.
"""

from typing import Literal, get_args

from shardloop.errors import UsageError

SleepLevel = Literal["cache", "weights"]
"""What a sleeping engine gives up: keys and values, or these and its weights."""
NO_WEIGHTS = -1
"""Version of an engine that has never had weights."""


class Gate:
    """Which version the weights are, whether they are there, and whether anything may run."""

    def __init__(self) -> None:
        self.version = NO_WEIGHTS
        self.asleep: SleepLevel | None = None
        self._next: int | None = None
        self._half_written = False
        self._discarded = False

    def begin(self, version: int) -> None:
        if type(version) is not int or version < 0:
            raise UsageError(f"begin_update: version={version!r}; choose a whole number from 0 up")
        self._half_written = self._next is not None
        self._next = version
        if self.asleep:
            self.asleep = "cache"

    def commit(self) -> None:
        self.check_updating("commit_update")
        assert self._next is not None, "check_updating has seen an open update"
        self.version, self._next, self._discarded = self._next, None, False

    def cancel(self) -> None:
        self.check_updating("cancel_update")
        if not self._half_written:
            self._next = None

    def sleep(self, level: SleepLevel) -> None:
        if level not in get_args(SleepLevel):
            raise UsageError(f"sleep: level={level!r}; choose {' or '.join(get_args(SleepLevel))}")
        if self._next is not None:
            raise UsageError(
                f"sleep while the update to version={self._next} is open; call commit_update first"
            )
        if level == "weights":
            self.asleep, self._discarded = level, True
        elif self.asleep is None:
            self.asleep = level

    def wake(self) -> None:
        self.asleep = None

    def check_updating(self, call: str) -> None:
        if self._next is None:
            raise UsageError(
                f"{call} outside an update (version={self.version}); call begin_update first"
            )

    def check_ready(self, call: str) -> None:
        if self._next is not None:
            raise UsageError(
                f"{call} while the update to version={self._next} is open and half written; "
                "call commit_update first"
            )
        if self.asleep is not None:
            raise UsageError(f"{call} while asleep (level={self.asleep!r}); call wake first")
        if self.version == NO_WEIGHTS:
            raise UsageError(
                f"{call} on an engine without weights; call begin_update, write them, commit_update"
            )
        if self._discarded:
            raise UsageError(
                f"{call} after a sleep that gave up the weights of version={self.version}; "
                "call begin_update, write them, commit_update"
            )
