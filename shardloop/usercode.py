"""Code of the user's: imported by name, and quoted in messages whatever it does. Floor 0.

Called by `tasks`, by `rewards` and by `controller.environments`.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from shardloop.errors import UsageError
from shardloop.types import shorten


def import_named(name: str, *, setting: str) -> Any:
    """What `package.module:name` stands for; modules are looked up as `python -m` does, in the
    working directory too.

    Args:
        setting: what it was given for, as messages call it.
    Raises:
        UsageError: it is not written so, there is no such module or name, or the module fails to
            import.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute.isidentifier() or not all(p.isidentifier() for p in module_name.split(".")):
        raise UsageError(
            f"{setting}={name!r}: write package.module:function, as in mypack.checks:score"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's module may raise anything, or call sys.exit
        raise UsageError(
            f"{setting}={name!r}: importing {module_name} failed: {told(error)}"
        ) from error
    if not hasattr(module, attribute):
        where = getattr(module, "__file__", None) or "a folder without that module"
        raise UsageError(f"{setting}={name!r}: {module_name} ({where}) has no {attribute!r}")
    return getattr(module, attribute)


def shown(value: object) -> str:
    """A value for a message."""
    try:
        return shorten(repr(value))
    except Exception:  # such as the digits of a huge integer
        return f"a {type(value).__name__}"


def told(error: BaseException) -> str:
    """An exception for a message."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the user's exception may fail even at this
        return type(error).__name__
