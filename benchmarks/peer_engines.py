"""The engines that ours is timed against: transformers in three ways, and vLLM in its own process.

Each is built once and called once a round; a call makes every request's own number of tokens, at
temperature 1 from the full distribution.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.measure import Timings
from benchmarks.models import PAD
from shardloop import hf
from shardloop.types import Request

NO_STOP = -1
PAGE_TOKENS = 16
"""Tokens of one page of transformers' cache."""
BATCH_TOKENS = 256
"""Most tokens of one of its forward passes. Both are the fastest of the sweep in README.md."""


def _generation_config(*, greedy: bool = False, **settings: Any) -> GenerationConfig:
    # top_k is 50 unless told otherwise, which would be another distribution.
    sampling = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(pad_token_id=PAD, eos_token_id=NO_STOP, **sampling, **settings)


class StaticGenerate:
    """`generate` on batches in the order given; each goes on to the end of its longest row."""

    def __init__(
        self, model: Any, requests: Sequence[Request], *, batch_size: int, greedy: bool = False
    ) -> None:
        self._model = model
        self._greedy = greedy
        self._batches = [
            list(requests[start : start + batch_size])
            for start in range(0, len(requests), batch_size)
        ]

    def __call__(self) -> None:
        self.tokens()

    @torch.no_grad()
    def tokens(self) -> list[list[int]]:
        """The tokens of each request, in order."""
        found = []
        for batch in self._batches:
            width = max(len(request.prompt_ids) for request in batch)
            pads = [width - len(request.prompt_ids) for request in batch]
            rows = zip(pads, batch, strict=True)
            ids = torch.tensor([[PAD] * pad + list(request.prompt_ids) for pad, request in rows])
            mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
            longest = max(request.sampling.max_tokens for request in batch)
            out = self._model.generate(
                ids,
                attention_mask=mask,
                generation_config=_generation_config(greedy=self._greedy, max_new_tokens=longest),
            )
            assert out.shape == (len(batch), width + longest), "a row ended early"
            found += [
                row[width : width + request.sampling.max_tokens].tolist()
                for row, request in zip(out, batch, strict=True)
            ]
        return found


def one_by_one(model: Any, requests: Sequence[Request]) -> StaticGenerate:
    """The naive loop: a batch for each request."""
    return StaticGenerate(model, requests, batch_size=1)


class ContinuousBatching:
    """transformers' own continuous batching, with cache and batch sized for this load.

    Left to itself it sizes both from the free memory and is many times slower. Every request gets
    its own length, and the requests of one prompt share its pages.
    """

    def __init__(
        self,
        folder: Path,
        requests: Sequence[Request],
        *,
        page_tokens: int = PAGE_TOKENS,
        batch_tokens: int = BATCH_TOKENS,
        num_blocks: int | None = None,
    ) -> None:
        # A model of its own: it switches the attention of the one it is given.
        self._model = hf.load_model(folder, dtype=torch.float32).eval()
        self._requests = requests
        pages = sum(
            -(-(len(request.prompt_ids) + request.sampling.max_tokens) // page_tokens)
            for request in requests
        )
        # Room for all requests at once, so that none has to wait for another's pages.
        self._config = ContinuousBatchingConfig(
            page_size=page_tokens,
            num_blocks=pages + len(requests) if num_blocks is None else num_blocks,
            max_batch_tokens=batch_tokens,
            max_requests_per_batch=len(requests),
        )

    def __call__(self) -> None:
        self.tokens()

    def tokens(self) -> list[list[int]]:
        """The tokens of each request, in order."""
        found: dict[str, list[int]] = {}
        with self._model.continuous_batching_context_manager(
            generation_config=_generation_config(),
            continuous_batching_config=self._config,
            timeout=60.0,
        ) as manager:
            for place, request in enumerate(self._requests):
                manager.add_request(
                    list(request.prompt_ids),
                    request_id=str(place),
                    max_new_tokens=request.sampling.max_tokens,
                    eos_token_id=NO_STOP,
                )
            while len(found) < len(self._requests):
                result = manager.get_result(timeout=1.0)
                if result is None:
                    assert manager.is_running(), "transformers' generation thread has died"
                elif result.is_finished():
                    found[result.request_id] = result.generated_tokens
        for place, request in enumerate(self._requests):
            wanted, made = request.sampling.max_tokens, len(found[str(place)])
            assert made == wanted, f"request {place}: {made} tokens instead of {wanted}"
        return [found[str(place)] for place in range(len(self._requests))]


class VLLMProcess:
    """vLLM in another interpreter, told over a pipe when to run; it keeps its own time."""

    def __init__(self, python: Path, folder: Path, requests: Sequence[Request]) -> None:
        script = Path(__file__).with_name("vllm_arm.py")
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environ |= {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._process = subprocess.Popen(
            [python, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        self._times: list[dict[str, float]] = []
        self._num_tokens = sum(request.sampling.max_tokens for request in requests)
        load = [[list(r.prompt_ids), r.sampling.max_tokens] for r in requests]
        self._ask({"model": str(folder), "requests": load})

    def __call__(self) -> None:
        answer = self._ask({})
        assert answer["tokens"] == self._num_tokens, f"vLLM made {answer['tokens']} tokens"
        self._times.append(answer)

    def close_and_time(self) -> Timings:
        """Ends the process; its times without the first, uncounted round."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        counted = self._times[1:]
        return Timings(
            wall_s=tuple(times["wall_s"] for times in counted),
            cpu_s=tuple(times["cpu_s"] for times in counted),
        )

    def _ask(self, message: dict[str, Any]) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the vLLM process has ended, status {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer
