"""Settings of every test: one thread, no network, the seed of randomised tests in the header."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


def pytest_configure() -> None:
    torch.set_num_threads(1)
    # A shell that starts the tests in the background has them ignore Ctrl-C, and tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    return f"seed: {SEED} (set SHARDLOOP_TEST_SEED to change it)"


SEED = int(os.environ.get("SHARDLOOP_TEST_SEED", "0"))


@pytest.fixture
def seed() -> int:
    """Seed of a randomised test; torch's global generator starts from it too."""
    torch.manual_seed(SEED)
    return SEED
