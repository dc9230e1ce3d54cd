"""Tiny random models, requests on them, and tensor-parallel ranks played by threads."""

import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from shardloop import hf
from shardloop.engines.local import LocalEngine
from shardloop.families import canonical_model
from shardloop.layout import make_layout
from shardloop.model import SingleProcess, TensorParallel
from shardloop.types import Request, SampleId, Sampling
from tests.models import make_folder

VOCAB = 37
CONTEXT = 64
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "tied": False},
    "llama-tied": {"family": "llama", "tied": True},
    "llama3-rope": {"family": "llama", "tied": False, "rope_parameters": LLAMA3_ROPE},
    "qwen2": {"family": "qwen2", "tied": False},
    "qwen2-tied": {"family": "qwen2", "tied": True},
    "qwen3": {"family": "qwen3", "tied": False, "head_dim": 16},
    "qwen3-tied": {"family": "qwen3", "tied": True, "head_dim": 16},
}


# Removed when the test run ends.
_HOME = TemporaryDirectory(prefix="shardloop-models-")


@cache
def model_folder(kind: str, seed: int = 0) -> Path:
    """A tiny model with random weights, norms and biases too, in Hugging Face format."""
    folder = Path(_HOME.name) / f"{kind}-{seed}"
    return make_folder(folder, seed=seed, std=0.2, vocab_size=VOCAB, **KINDS[kind])


def transformers_model(
    kind: str, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> nn.Module:
    return hf.load_model(model_folder(kind, seed), dtype=dtype)


@cache
def weights_of(kind: str, seed: int = 0) -> dict[str, Tensor]:
    """State dict of that model. Ask before starting threads: transformers loads in one only."""
    return dict(transformers_model(kind, seed=seed).state_dict())


def empty_engine(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.float64,
    comm: TensorParallel | None = None,
    max_slots: int = 16,
    **options: Any,
) -> LocalEngine:
    """An engine of the model of a config.json, without weights."""
    comm = SingleProcess() if comm is None else comm
    layout = make_layout(canonical_model(config), f"engine:tp={comm.size}")
    options = {"layout": layout, "rank": comm.rank, "max_slots": max_slots} | options
    return LocalEngine(config, comm=comm, dtype=dtype, **options)


def make_engine(
    kind: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any
) -> LocalEngine:
    """An engine with the weights of `transformers_model(kind, seed=seed)`."""
    engine = empty_engine(hf.load_config(model_folder(kind, seed)), dtype=dtype, **options)
    engine.load_from_state_dict(weights_of(kind, seed))
    return engine


def make_requests(
    *, prompts: int = 4, samples: int = 3, max_tokens: int = 6, seed: int = 0, **sampling: Any
) -> list[Request]:
    """`samples` requests for each of `prompts` random prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for prompt in range(prompts):
        ids = torch.randint(0, VOCAB, (3 + 2 * prompt,), generator=generator)
        requests += [
            Request(
                prompt_ids=tuple(ids.tolist()),
                sampling=Sampling(max_tokens=max_tokens, **sampling),
                sample_id=SampleId(prompt_uid=f"p{prompt}", index=index),
                seed=seed,
            )
            for index in range(samples)
        ]
    return requests


class ThreadComm:
    """One rank of a tensor-parallel group whose ranks are threads of this process."""

    def __init__(self, rank: int, parts: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(parts)
        self._parts, self._barrier = parts, barrier

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._parts[self.rank] = x
        self._barrier.wait()
        everyone = list(self._parts)
        self._barrier.wait()
        return everyone

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).amax(0)

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        return torch.cat(self._exchange(x), dim=-1)


def run_threads(fn: Callable[[ThreadComm], Any], size: int) -> list[Any]:
    """`fn(comm)` on `size` ranks at the same time; results by rank, or the first error."""
    parts, barrier = [None] * size, threading.Barrier(size, timeout=30)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = fn(ThreadComm(rank, parts, barrier))
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
