"""A policy that is one row of logits, and what a loop needs around it; all in this process."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shardloop.config import GRPOConfig
from shardloop.controller.collect import COLLECTORS, Collect
from shardloop.controller.engines import Engines
from shardloop.errors import TaskError
from shardloop.rl.batch import Batch
from shardloop.rl.losses import ppo_clip_loss
from shardloop.types import Completion, Prompt, Request

VOCAB = 5
STOP = 0


class InProcessGroup:
    """The `call` of a worker group over plain objects, one per rank; remembers what was called."""

    def __init__(self, *objects: Any) -> None:
        self.objects = objects
        self.calls: list[str] = []
        self.is_alive = True

    def alive(self) -> bool:
        return self.is_alive

    def call(self, method: str, *args: Any, collect: Collect = "all", **kwargs: Any) -> Any:
        self.calls.append(method)
        members = [getattr(one, method) for one in self.objects]
        values = [m(*args, **kwargs) if callable(m) else m for m in members]
        return COLLECTORS[collect](values)

    def submit(self, method: str, *args: Any, collect: Collect = "all", **kwargs: Any) -> "Done":
        return Done(self.call(method, *args, collect=collect, **kwargs))

    def split(self, num_parts: int) -> "list[InProcessGroup]":
        size = len(self.objects) // num_parts
        starts = range(0, len(self.objects), size)
        return [InProcessGroup(*self.objects[start : start + size]) for start in starts]


@dataclass
class Done:
    """An answer that is there already."""

    value: Any

    def result(self) -> Any:
        return self.value


def engines_of(*engines: Any) -> Engines:
    """Replicas of one rank each, in this process."""
    return Engines(InProcessGroup(*engines), num_replicas=len(engines))  # type: ignore[arg-type]


class RowTrainer:
    """Trains logits [V] that every position shares, by plain gradient steps, in float64."""

    def __init__(self) -> None:
        self.version = 0
        self.logits_V = torch.zeros(VOCAB, dtype=torch.float64, requires_grad=True)
        self.reference_V = torch.zeros(VOCAB, dtype=torch.float64)
        self.learning_rates: list[float] = []
        self.batches: list[Batch] = []

    def _score(self, logits_V: Tensor, batch: Batch) -> Tensor:
        logprobs_V = torch.log_softmax(logits_V / batch.temperature, dim=0)
        return logprobs_V[batch.token_ids_N] * batch.loss_mask_N

    def logprobs(self, batch: Batch, *, policy: str = "current") -> Tensor:
        return self._score(
            self.logits_V if policy == "current" else self.reference_V, batch
        ).detach()

    def forward_backward(self, batch: Batch, loss: GRPOConfig) -> dict[str, float]:
        self.batches.append(batch)
        mask = batch.loss_mask_N
        assert batch.old_N is not None and batch.advantages_N is not None
        policy = ppo_clip_loss(
            self._score(self.logits_V, batch)[mask],
            batch.old_N[mask],
            batch.advantages_N[mask],
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
        )
        num_tokens = max(1, batch.num_loss_tokens)
        objective = policy.loss_n.sum() / num_tokens
        objective.backward()
        return {
            "loss": objective.item(),
            "clip_fraction": int(policy.is_clipped_n.sum()) / num_tokens,
            "entropy": 0.0,
        }

    def step(self, lr: float) -> dict[str, float]:
        self.learning_rates.append(lr)
        assert self.logits_V.grad is not None
        with torch.no_grad():
            self.logits_V -= lr * self.logits_V.grad
        norm = self.logits_V.grad.norm().item()
        self.logits_V.grad = None
        return {"grad_norm": norm}

    def advance_version(self) -> int:
        self.version += 1
        return self.version


class RowEngine:
    """Samples from a copy of the logits; noise is a function of seed, sample id and position."""

    behave_offset = 0.0
    """Added to the log-prob under the distribution sampled from, as top-p would."""

    def __init__(self, tweak: Callable[[Completion], Completion] = lambda c: c) -> None:
        self.version = -1
        self.logits_V = torch.zeros(VOCAB, dtype=torch.float64)
        self.requests: list[Request] = []
        self._tweak = tweak

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.requests += requests
        return [self._tweak(self._complete(request)) for request in requests]

    def _complete(self, request: Request) -> Completion:
        temperature = request.sampling.temperature
        logprobs_V = torch.log_softmax(self.logits_V / (temperature or 1.0), dim=0)
        ids: list[int] = []
        while len(ids) < request.sampling.max_tokens and STOP not in ids:
            noise = random.Random(f"{request.seed}/{request.sample_id}/{len(ids)}").random()
            drawn = int((logprobs_V.exp().cumsum(0) < noise).sum())
            ids.append(int(logprobs_V.argmax()) if temperature == 0.0 else min(drawn, VOCAB - 1))
        full = [logprobs_V[token].item() for token in ids]
        return Completion(
            request=request,
            token_ids_T=tuple(ids),
            behave_T=tuple(value + self.behave_offset for value in full),
            full_T=tuple(full),
            version_T=(self.version,) * len(ids),
            loss_mask_T=(1,) * len(ids),
            finish_reason="stop" if ids[-1] == STOP else "length",
        )


@dataclass
class Report:
    wire_bytes: int
    density: None = None


class RowSync:
    def __init__(self, trainer: RowTrainer, engine: RowEngine) -> None:
        self.trainer, self.engine = trainer, engine
        self.versions: list[int] = []

    def sync(self, version: int) -> Report:
        self.versions.append(version)
        self.engine.logits_V = self.trainer.logits_V.detach().clone()
        self.engine.version = version
        return Report(wire_bytes=8 * VOCAB)


class DigitTask:
    """Prompts "1", "2", "3", … of one stream per seed."""

    name = "digits"
    default_reward = "none"
    stop_text = None

    def prompts(self, split: str, *, seed: int, start: int, count: int) -> list[Prompt]:
        if split != "train":
            raise TaskError("no test split")
        return [
            Prompt(uid=f"{seed}/{place}", text=str(place)) for place in range(start, start + count)
        ]


class LetterTokenizer:
    vocab_size = VOCAB
    stop_token_ids = (STOP,)

    def encode(self, text: str) -> list[int]:
        return [1 + int(letter) % (VOCAB - 1) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join("abcd"[token - 1] for token in token_ids if token != STOP)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return self.encode(prompt.text or "")


def share_of_a(prompt: Prompt, text: str, *, finished: bool) -> float:
    return text.count("a") / len(text) if text else 0.0


def aborted(completion: Completion) -> Completion:
    return replace(completion, finish_reason="aborted")
