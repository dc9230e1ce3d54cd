"""Settings as plain JSON data, and back. Floor 0; for manifests."""

from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

from shardloop.config.checks import require

ConfigT = TypeVar("ConfigT")


def to_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as plain JSON data."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return str(value) if isinstance(value, Path) else value

    result: dict[str, Any] = plain(asdict(config))
    return result


def from_dict(cls: type[ConfigT], data: dict[str, Any]) -> ConfigT:
    """The config dataclass `cls` from what `to_dict` made.

    Raises:
        UsageError: a key that `cls` does not have, or a value its checks refuse.
    """
    hints = get_type_hints(cls)
    unknown = sorted(set(data) - set(hints))
    require("unknown settings", unknown, not unknown, f"{cls.__name__} has {sorted(hints)}")

    def revive(hint: Any, value: Any) -> Any:
        if isinstance(hint, type) and is_dataclass(hint):
            return from_dict(hint, value)
        if get_origin(hint) is tuple:
            return tuple(value)
        return Path(value) if hint is Path else value

    return cls(**{name: revive(hints[name], value) for name, value in data.items()})
