"""What to say of files that are not there or cannot be read. Called by the formats. Floor 3."""

from pathlib import Path

from shardloop.errors import CheckpointError
from shardloop.types import shorten

LONGEST_REASON = 160


def damaged(path: Path, cause: BaseException) -> CheckpointError:
    """Of a file whose content is not what it should be."""
    reason = shorten(" ".join(str(cause).split()), LONGEST_REASON)
    return CheckpointError(
        f"{path}: damaged or cut short ({type(cause).__name__}: {reason}); copy or save it again"
    )


def demand_file(path: Path) -> None:
    """
    Raises:
        CheckpointError: there is none.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; copy all files of the checkpoint")


def as_disk_error(cause: BaseException) -> BaseException:
    """What torch's writer of archives raises where a disk is full, as what it is."""
    is_archive = isinstance(cause, RuntimeError) and "inline_container" in str(cause)
    return (
        OSError(f"the archive cannot be written, the disk may be full ({cause})")
        if is_archive
        else cause
    )
