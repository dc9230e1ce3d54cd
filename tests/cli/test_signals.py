"""SIGINT, SIGTERM and SIGHUP: the first ends a run after its step, the second at once, cleanly."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardloop.checkpoint import latest_checkpoint
from shardloop.cli import interrupt
from shardloop.cli.interrupt import InterruptFlag, stop_at_once
from shardloop.metrics import read_jsonl
from shardloop.parallel.signals import ENDING, postponed

ROOT = Path(__file__).resolve().parents[2]
TRAIN = (
    *("train", "--preset", "tiny", "--sft.steps", "2", "--eval.prompts", "8", "--eval.every", "0"),
    *("--grpo.prompts-per-step", "2", "--grpo.samples-per-prompt", "2", "--steps", "5000"),
    *("--trainer.layout", "fsdp=1", "--engine.layout", "engine:tp=1", "--checkpoint.every", "0"),
)
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def hang_up_is_not_ignored() -> Iterator[None]:
    """As in an ordinary program, though the tests may run under nohup, which ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", ENDING)
def test_the_first_signal_sets_the_flag_and_the_second_interrupts(number: int) -> None:
    before = [signal.getsignal(n) for n in ENDING]
    with InterruptFlag() as flag:
        assert not flag.is_set()
        signal.raise_signal(number)
        assert flag.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(n) for n in ENDING] == before


def test_a_closed_terminal_is_one_signal_though_kernel_and_shell_both_send_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with InterruptFlag() as flag:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        assert flag.is_set()
        monkeypatch.setattr(interrupt, "HANG_UP_S", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)


def test_nohup_is_respected() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with InterruptFlag() as flag, stop_at_once():
        signal.raise_signal(signal.SIGHUP)
        assert not flag.is_set()


@pytest.mark.parametrize("number", ENDING)
def test_a_command_without_steps_is_interrupted_at_once(number: int) -> None:
    with pytest.raises(KeyboardInterrupt), stop_at_once():
        signal.raise_signal(number)


@pytest.mark.parametrize("number", ENDING)
def test_a_postponed_signal_takes_effect_once_and_afterwards(number: int) -> None:
    done = False
    with InterruptFlag() as flag:
        with postponed():
            signal.raise_signal(number)
            signal.raise_signal(number)
            assert not flag.is_set()
            done = True
        assert done and flag.is_set()


_WRITER = """
import sys, time
from shardloop.cli.interrupt import InterruptFlag
with InterruptFlag() as flag:
    print("ready", flush=True)
    while not flag.is_set():
        time.sleep(0.01)
    print("the step is done", flush=True)
    print("saved", file=sys.stderr, flush=True)
sys.exit(130)
"""


def test_output_to_a_terminal_that_has_closed_is_no_error() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", _WRITER])
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130


def session_of(leader: int) -> list[str]:
    """Command lines of the processes of a session, orphans included."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append((entry / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # ended while we looked
    return found


@linux_only
@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGTERM, None), pytest.param(signal.SIGHUP, signal.SIGTERM, marks=pytest.mark.slow)],
)
def test_a_signal_to_every_process_ends_the_run_like_ctrl_c_and_leaves_nothing(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    first: int,
    second: int | None,
) -> None:
    out, temporary = tmp_path / "runs", tmp_path_factory.mktemp("t")  # sockets bear no long paths
    process = subprocess.Popen(
        [sys.executable, "-m", "shardloop", *TRAIN, "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    root = wait_for_first_step(process, out)
    os.killpg(process.pid, first)
    if second is not None:
        os.killpg(process.pid, second)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    wait_until_empty(process.pid)
    assert list(temporary.glob("shardloop-*")) == []
    if second is None:
        newest, done = latest_checkpoint(root / "checkpoints"), read_jsonl(root / "metrics.jsonl")
        assert newest is not None and newest.name == f"step-{done[-1]['step']:06d}"


def wait_for_first_step(process: "subprocess.Popen[str]", out: Path) -> Path:
    """The run's folder, once a step is in its metrics."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        for metrics in out.glob("*/metrics.jsonl"):
            if metrics.read_text():
                return metrics.parent
        time.sleep(0.05)
    raise AssertionError("no step came")


def wait_until_empty(leader: int) -> None:
    deadline = time.monotonic() + 10
    while (left := session_of(leader)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
