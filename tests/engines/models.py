"""Tiny random models, requests on them, and tensor-parallel ranks played by threads."""

import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shardloop import hf
from shardloop.engines.local import LocalEngine
from shardloop.families import canonical_model
from shardloop.layout import make_layout
from shardloop.model import SingleProcess, TensorParallel
from shardloop.types import Request, SampleId, Sampling

VOCAB = 37
CONTEXT = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama3-rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen2-tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3-tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
}


# Removed when the test run ends.
_HOME = TemporaryDirectory(prefix="shardloop-models-")


@cache
def model_folder(kind: str, seed: int = 0) -> Path:
    """A tiny model with random weights, norms and biases too, in Hugging Face format."""
    config_type, model_type, extra = KINDS[kind]
    torch.manual_seed(seed)
    model = model_type(config_type(**SIZES, **extra))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    folder = Path(_HOME.name) / f"{kind}-{seed}"
    model.save_pretrained(folder)
    return folder


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
