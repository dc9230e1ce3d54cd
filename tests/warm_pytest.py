"""Pytest in a tree, without the seconds in which a fresh process imports torch.

Used by tests/run_mutants.py. A helper process imports once what nearly every test needs, except
shardloop and the tests themselves, which each of its forks then finds in the tree it was given.

    WarmPytest.run ──▶ helper, warm ──fork──▶ cd tree ──▶ pytest
         ▲                  │                               │
         └── how it ended ◀─┴── waits, at most timeout_s ◀──┘
"""

import gc
import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue

import pytest

PRELOAD = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "hypothesis",
    "tyro",
)
OPTIONS = (
    *("-q", "--tb=short", "-rfE", "-p", "no:cacheprovider", "-p", "no:anyio"),
    # Two of the libraries come with pytest plugins, whose asserts nobody will look at.
    *("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"),
)


class WarmPytest:
    """`jobs` such helpers, which end with the context; any thread may ask for a run."""

    def __init__(self, *, jobs: int) -> None:
        # What tests/conftest.py sets before these imports, and no caches in the trees.
        settings = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "PYTHONDONTWRITEBYTECODE")
        env = {**os.environ, **dict.fromkeys(settings, "1")}
        self._helpers = [
            subprocess.Popen(
                [sys.executable, __file__, *PRELOAD],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(jobs)
        ]
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        for helper in self._helpers:
            self._idle.put(helper)

    def __enter__(self) -> "WarmPytest":
        return self

    def __exit__(self, *error: object) -> None:
        for helper in self._helpers:
            helper.communicate()

    def run(self, tree: Path, tests: Sequence[str], *, timeout_s: float) -> tuple[int, str]:
        """Pytest's exit code (-n: ended by signal n, which is 9 after `timeout_s`) and output.

        A test that has failed in one case is not tried in its further cases.
        """
        helper = self._idle.get()
        assert helper.stdin is not None and helper.stdout is not None
        with tempfile.NamedTemporaryFile("r", prefix="shardloop-pytest-", errors="replace") as out:
            request = json.dumps([str(tree), tests, out.name, timeout_s])
            try:
                print(request, file=helper.stdin, flush=True)
                answer = helper.stdout.readline()
            finally:
                self._idle.put(helper)
            if not answer:
                raise RuntimeError("the helper that runs pytest has ended; see its error above")
            return int(answer), out.read()


class OneFailureIsEnough:
    """A plugin that skips the further cases of a parametrised test that has failed."""

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid.split("[")[0])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.nodeid.split("[")[0] in self._failed:
            pytest.skip("another case has failed")


def _run_pytest(tree: str, tests: Sequence[str], output: str) -> None:
    """The whole life of a fork; its process group is its own, so that all of it can be ended."""
    os.setpgrp()
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    sys.path[0] = tree  # until now the folder of this file
    os.environ["PYTHONPATH"] = tree  # for the processes that tests start
    found = importlib.util.find_spec("shardloop")
    if found is None or found.origin is None or not Path(found.origin).is_relative_to(tree):
        print(f"shardloop is imported from {found and found.origin}, not from {tree}")
        sys.exit(pytest.ExitCode.INTERNAL_ERROR)
    sys.exit(pytest.main([*OPTIONS, *tests], plugins=[OneFailureIsEnough()]))


def _serve() -> None:
    """Answer every request on stdin with an exit code on stdout, until stdin ends."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # no fork need look for garbage in what it shares
    for line in sys.stdin:
        *request, timeout_s = json.loads(line)
        process = multiprocessing.get_context("fork").Process(target=_run_pytest, args=request)
        process.start()
        assert process.pid is not None
        try:
            process.join(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.join()
        print(process.exitcode, flush=True)


if __name__ == "__main__":
    _serve()
