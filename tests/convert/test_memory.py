"""A conversion needs memory for about one tensor, however large the model is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardloop import hf
from shardloop.convert.sources import model_of
from shardloop.hf.shards import write_weights
from tests.convert.models import GROUPED

CONFIG = {
    **GROUPED,
    "model_type": "llama",
    "vocab_size": 12288,
    "hidden_size": 512,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "tie_word_embeddings": False,
}
LARGEST_BYTES = 12288 * 512 * 4

PROGRAM = """
import sys
from pathlib import Path
import torch
from shardloop.convert import convert, open_source, parse_target

torch.set_num_threads(1)
small, src, to, dst = sys.argv[1:]
say = lambda *_: None
# Everything that is loaded or kept at the first use is there before memory is looked at.
convert(open_source(Path(small)), parse_target(to), Path(dst + "-small"), dtype=None, progress=say)
print("ready", flush=True)
sys.stdin.readline()
convert(open_source(Path(src)), parse_target(to), Path(dst), dtype=None, progress=say)
"""


def make(folder: Path, **changes: int) -> Path:
    folder.mkdir()
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    specs = {
        name: hf.TensorSpec(shape, torch.float32)
        for name, shape in model_of(config).tensor_shapes().items()
    }
    write_weights(folder, specs, lambda name: torch.full(specs[name].shape, 0.5))
    return folder


def anonymous_bytes(pid: int) -> int:
    """Memory that is no page of a file; 0 once the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = [line.split() for line in status.splitlines() if line.startswith("RssAnon")]
    return int(lines[0][1]) * 1024 if lines else 0


def peak(small: Path, src: Path, to: str, dst: Path) -> float:
    """Of a conversion, over what there was before, in largest tensors; looked at from outside."""
    command = [sys.executable, "-c", PROGRAM, *map(str, (small, src, to, dst))]
    # The C library is to give back what is freed at once, else it keeps up to twice the largest.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env
    ) as child:
        assert child.stdin and child.stdout and child.stderr
        assert child.stdout.readline() == "ready\n", child.stderr.read()[-2000:]
        before = most = anonymous_bytes(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        while child.poll() is None:
            most = max(most, anonymous_bytes(child.pid))
        assert child.returncode == 0, child.stderr.read()[-2000:]
    return (most - before) / LARGEST_BYTES


@pytest.mark.slow
def test_the_peak_is_about_one_tensor_of_a_model_of_many(tmp_path) -> None:
    small = make(tmp_path / "small", vocab_size=10, intermediate_size=24)
    large = make(tmp_path / "large")
    assert sum(p.stat().st_size for p in large.iterdir()) > 8 * LARGEST_BYTES
    peaks = {
        "hf to hf": peak(small, large, "hf", tmp_path / "hf"),
        "hf to dcp": peak(small, large, "dcp", tmp_path / "dcp"),
        "dcp to hf": peak(tmp_path / "dcp-small", tmp_path / "dcp", "hf", tmp_path / "back"),
    }
    assert all(share < 1.5 for share in peaks.values()), peaks
    # Else the sampling would have missed even the one tensor that must be there.
    assert peaks["dcp to hf"] > 0.5, peaks
