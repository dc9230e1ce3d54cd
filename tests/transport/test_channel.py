"""A line between two processes: what comes by it, who inherits it, and its end."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from shardloop.errors import WorkerDied
from shardloop.transport.channel import Channel, Listener

WAIT_S = 20.0


@contextmanager
def line() -> Iterator[tuple[Channel, Channel]]:
    """Its two ends, both in this process."""
    listener = Listener(backlog=1, timeout_s=WAIT_S)
    with (
        closing(listener),
        closing(Channel.connect(listener.address, timeout_s=WAIT_S)) as ours,
        closing(listener.accept()) as theirs,
    ):
        yield ours, theirs


OPEN_FILES = """
import os
for name in os.listdir("/proc/self/fd"):
    if os.path.lexists("/proc/self/fd/" + name):
        print(os.readlink("/proc/self/fd/" + name))
"""


def test_a_program_that_a_rank_starts_inherits_no_line_and_no_file_that_came_by_one() -> None:
    """Else a rank that has died would look alive to its peer as long as that program runs."""
    memory = os.memfd_create("shardloop", os.MFD_CLOEXEC)
    with line() as (ours, theirs):
        ours.put(7, what="a number", descriptor=memory)
        number, came = theirs.get_with_file(what="a number")
        inodes = [os.fstat(end._line.fileno()).st_ino for end in (ours, theirs)]
        command = [sys.executable, "-c", OPEN_FILES]
        program = subprocess.run(command, close_fds=False, capture_output=True, text=True)
    assert program.returncode == 0 and number == 7 and came is not None
    assert "memfd:shardloop" not in program.stdout
    assert not [inode for inode in inodes if f"socket:[{inode}]" in program.stdout]
    os.close(came)
    os.close(memory)


def test_a_closed_line_is_an_error_at_once() -> None:
    with line() as (ours, theirs):
        theirs.close()
        with pytest.raises(WorkerDied, match="a word: a rank has died or given up"):
            ours.get(what="a word")
