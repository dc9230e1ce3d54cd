"""What a run does when something breaks in the middle: one error, one code, no hang."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardloop.checkpoint import latest_checkpoint
from shardloop.cli.main import main
from shardloop.metrics import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
QUICK = (
    *("--preset", "tiny", "--sft.steps", "2", "--eval.prompts", "8", "--eval.every", "0"),
    *("--grpo.prompts-per-step", "2", "--grpo.samples-per-prompt", "2"),
)
REWARDS = "tests.cli.rewards"
TWO_RANKS = ("--trainer.layout", "fsdp=1", "--engine.layout", "engine:tp=1")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def start(
    out: Path, *arguments: str, before: Callable[[], None] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shardloop", "train", *QUICK, "--out", str(out), *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=before,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and everything on stderr; the process must end and leave none of its own behind."""
    _, errors = process.communicate(timeout=120)
    deadline = time.monotonic() + 10
    while (left := descendants(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes left behind: {left}"
    return process.returncode, errors


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, from /proc."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue  # ended while we looked
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found, frontier = [], [pid]
    while frontier:
        children = [child for child, parent in parents.items() if parent == frontier[0]]
        found += children
        frontier = frontier[1:] + children
    return found


def wait_for_step(out: Path, step: int) -> Path:
    """The run's folder, once that step is in its metrics."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for metrics in out.glob("*/metrics.jsonl"):
            if len(metrics.read_text().splitlines()) >= step:
                return metrics.parent
        time.sleep(0.05)
    raise AssertionError(f"step {step} did not come")


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The ranks: what the fork server has forked."""
    return [pid for pid in descendants(process.pid) if not _children_exist(pid)]


def _children_exist(pid: int) -> bool:
    return bool(descendants(pid))


@pytest.mark.parametrize(
    ("reward", "message"), [("returns_nan", "nan"), ("raises", "LookupError: no entry for")]
)
def test_a_reward_that_fails_ends_the_run_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reward: str, message: str
) -> None:
    arguments = (*QUICK, *TWO_RANKS, "--out", str(tmp_path), "--reward", f"{REWARDS}:{reward}")
    code, errors = main(["train", *arguments]), capsys.readouterr().err
    assert code == 3 and message in errors and reward in errors, errors
    assert "Traceback" not in errors


def test_a_killed_rank_is_named_and_the_run_ends(tmp_path: Path) -> None:
    process = start(tmp_path, "--steps", "5000")
    wait_for_step(tmp_path, 2)
    os.kill(max(workers_of(process)), signal.SIGKILL)
    code, errors = finish(process)
    assert code == 5, errors
    assert "rank " in errors and "SIGKILL" in errors


def test_ctrl_c_saves_the_step_and_the_run_can_go_on(tmp_path: Path) -> None:
    process = start(tmp_path, *TWO_RANKS, "--steps", "5000", "--checkpoint.every", "0")
    root = wait_for_step(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    code, errors = finish(process)
    assert code == 130, errors
    done = read_jsonl(root / "metrics.jsonl")[-1]["step"]
    assert f"stopped after step {done} of 5000" in errors and "--resume" in errors
    newest = latest_checkpoint(root / "checkpoints")
    assert newest is not None and newest.name == f"step-{done:06d}"


@pytest.mark.slow
def test_a_full_disk_is_one_error_and_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    def no_large_files() -> None:
        # The exported start has 0.4 MB, the checkpoint of one rank 1.6 MB.
        resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))

    arguments = (*TWO_RANKS, "--steps", "3", "--checkpoint.every", "2")
    process = start(tmp_path, *arguments, before=no_large_files)
    code, errors = finish(process)
    assert code == 6, errors
    assert "step-000002" in errors and "earlier checkpoints are intact" in errors
    (root,) = tmp_path.iterdir()
    assert list((root / "checkpoints").iterdir()) == []
    assert len(read_jsonl(root / "metrics.jsonl")) in (2, 3)  # written while step 3 was made
