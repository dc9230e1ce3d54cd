"""Typed reading of a config.json: whatever is missing or of another kind is named. Floor 1.

Called by `families.table`, `model.config` and `hf.config`; so a field is checked once, where it is
used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from shardloop.errors import ModelError
from shardloop.types import shorten

MOST = 2**31 - 1
LONGEST_VALUE = 200


@dataclass(frozen=True, slots=True)
class Fields:
    """The contents of a config.json, or an object within it.

    A field that is null counts as missing, but not where a default that is no null would stand
    in for it: transformers takes null at its word.

    Every reader raises:
        ModelError: names the field, its value and what is allowed.
    """

    values: Mapping[str, Any]
    where: str = "config.json"

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def given(self, key: str) -> bool:
        """False where the field is null. It may not be missing: null must be meant."""
        if key not in self.values:
            raise ModelError(f"{self.where} has no {key}; add it, null where the model has none")
        return self.has(key)

    def whole(self, key: str, *, least: int = 1, most: int = MOST) -> int:
        value = self._given(key)
        if type(value) is not int or not least <= value <= most:
            self.refuse(key, f"it must be a whole number from {least} to {most}")
        return value

    def number(self, key: str, *, least: float = 0.0) -> float:
        """A finite number above `least`."""
        value = self._given(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least < value < float("inf"):
            self.refuse(key, f"it must be a finite number above {least:g}")
        return float(value)

    def flag(self, key: str) -> bool:
        """False where the field is missing."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self.refuse(key, "it must be true or false")
        return value

    def choice(self, key: str, allowed: Sequence[str], *, default: str) -> str:
        value = self.values.get(key, default)
        if value not in allowed:
            self.refuse(key, f"is not supported; choose {' or '.join(allowed)}")
        return str(value)

    def section(self, key: str) -> "Fields":
        """An object within this one; an empty one where it is missing."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            self.refuse(key, "it must be an object")
        return Fields(value or {}, f"{self.where}, {key}")

    def ids(self, key: str, *, below: int | None = None) -> tuple[int, ...]:
        """Token ids: one, a list of them, or none where the field is missing."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        end = MOST if below is None else below
        if any(type(token_id) is not int or not 0 <= token_id < end for token_id in ids):
            self.refuse(key, f"it must be a token id from 0 to {end - 1}, or a list of such ids")
        return tuple(ids)

    def refuse(self, key: str, reason: str) -> NoReturn:
        joint = " " if reason.startswith("is ") else "; "
        value = shorten(repr(self.values.get(key)), LONGEST_VALUE)
        raise ModelError(f"{self.where}: {key}={value}{joint}{reason}")

    def _given(self, key: str) -> Any:
        if not self.has(key):
            raise ModelError(f"{self.where} has no {key}; add it as the model's authors give it")
        return self.values[key]
