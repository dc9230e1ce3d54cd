"""Whole GRPO steps of ours and of TRL's GRPOTrainer, in turn, in one process.

    TRL's step ──▶ its callback: note its seconds, make and time our step ──▶ TRL's next step …

Both start from one model folder, whose weights give the end-of-sequence token a constant
probability, and get the same prompts; each draws its own completions.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.load import Load
from benchmarks.measure import cpu_seconds, ratio
from benchmarks.models import EOS, ModelSize, write_model
from benchmarks.ours import make_engine, make_trainer
from benchmarks.peer_trainers import CLIP, LR, MICRO_BATCH, make_trl_trainer
from shardloop.config import GRPOConfig, OptimConfig, TrainerConfig
from shardloop.parallel.context import RankContext
from shardloop.rl.advantages import grpo_advantages
from shardloop.rl.batch import make_batch
from shardloop.types import Request, SampleId, Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeSize:
    prompts: int
    samples: int
    prompt_tokens: int
    mean_length: float
    cap: int
    rounds: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One step of one arm."""

    wall_s: float
    cpu_s: float
    tokens: int
    """Of the completions."""


def even_share(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    """The reward: share of even token ids. It has nothing to do with length."""
    return [sum(t % 2 == 0 for t in ids) / max(1, len(ids)) for ids in completion_ids]


class OurRun:
    """Engine and trainer of one rank; a call is one step on the next prompts."""

    def __init__(
        self,
        folder: Path,
        size: WholeSize,
        prompts: Sequence[tuple[int, ...]],
        context: RankContext,
    ) -> None:
        self._size, self._prompts = size, prompts
        self._trainer = make_trainer(
            context, folder, config=TrainerConfig(layout="fsdp=1"), optim=OptimConfig()
        )
        self._engine = make_engine(folder, max_slots=size.prompts * size.samples)
        self._grpo = GRPOConfig(clip_low=CLIP, clip_high=CLIP, correction="none")
        self._step = 0

    def __call__(self) -> int:
        """Returns the number of completion tokens."""
        first = self._step * self._size.prompts
        prompts = self._prompts[first : first + self._size.prompts]
        completions = self._engine.generate(self._requests(prompts))
        rewards = even_share([completion.token_ids_T for completion in completions])
        rewards_PG = torch.tensor(rewards).view(-1, self._size.samples)
        batch = make_batch(completions, grpo_advantages(rewards_PG).flatten())
        batch = replace(batch, old_N=self._trainer.logprobs(batch))
        self._trainer.forward_backward(batch, self._grpo)
        self._trainer.step(LR)
        version = self._trainer.advance_version()
        self._engine.load_from_state_dict(self._trainer.shards(), version=version)
        self._step += 1
        return sum(len(completion.token_ids_T) for completion in completions)

    def _requests(self, prompts: Sequence[tuple[int, ...]]) -> list[Request]:
        sampling = Sampling(max_tokens=self._size.cap, stop_token_ids=(EOS,))
        return [
            Request(
                prompt_ids=ids,
                sampling=sampling,
                sample_id=SampleId(prompt_uid=str(prompt), index=index),
                seed=self._step,
            )
            for prompt, ids in enumerate(prompts)
            for index in range(self._size.samples)
        ]


class Alternate(TrainerCallback):
    """Makes one of our steps after each of TRL's, and keeps the seconds of both."""

    def __init__(self, ours: OurRun) -> None:
        self._ours = ours
        self.records: dict[str, list[Record]] = {"ours": [], "trl": []}
        self._drawn = 0
        self._since = (0.0, 0.0)

    def count(
        self, completions: Any, completion_ids: Sequence[Sequence[int]], **_: Any
    ) -> list[float]:
        """TRL's reward function, which sees the tokens it has drawn."""
        self._drawn += sum(len(ids) for ids in completion_ids)
        return even_share(completion_ids)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._note("trl", self._drawn)
        self._begin()
        self._note("ours", self._ours())
        self._begin()

    def _begin(self) -> None:
        self._drawn = 0
        self._since = (time.perf_counter(), cpu_seconds())

    def _note(self, arm: str, tokens: int) -> None:
        wall_s, cpu_s = self._since
        self.records[arm].append(
            Record(wall_s=time.perf_counter() - wall_s, cpu_s=cpu_seconds() - cpu_s, tokens=tokens)
        )


def run_whole(
    model: ModelSize, size: WholeSize, context: RankContext, workdir: Path
) -> dict[str, Any]:
    """`size.rounds` steps of both, after one of each that is not counted."""
    folder = write_model(workdir / "model", model, mean_length=size.mean_length)
    num_steps = size.rounds + 1
    prompts = Load(
        prompts=size.prompts * num_steps,
        samples=size.samples,
        prompt_tokens=size.prompt_tokens,
        median=1,
        sigma=0.0,
        cap=1,
        vocab=model.vocab,
    ).prompt_ids()
    alternate = Alternate(OurRun(folder, size, prompts, context))
    trainer = make_trl_trainer(
        folder,
        out=workdir / "trl",
        prompts=prompts,
        num_generations=size.samples,
        accumulation=size.prompts * size.samples // MICRO_BATCH,
        gradient_checkpointing=True,
        max_completion_length=size.cap,
        max_steps=num_steps,
        reward_funcs=alternate.count,
        callbacks=[alternate],
    )
    trainer.train()
    counted = {arm: found[1:] for arm, found in alternate.records.items()}
    return summary(counted, num_completions=size.prompts * size.samples)


def summary(records: dict[str, list[Record]], *, num_completions: int) -> dict[str, Any]:
    per_token = {
        arm: [(r.wall_s / r.tokens, r.cpu_s / r.tokens) for r in found]
        for arm, found in records.items()
    }
    ours_wall, ours_cpu = zip(*per_token["ours"], strict=True)
    arms = {}
    for arm, found in records.items():
        wall, cpu = zip(*per_token[arm], strict=True)
        arms[arm] = {
            "tokens_per_s": 1 / statistics.median(wall),
            "cpu_s": statistics.median(record.cpu_s for record in found),
            "wall_ratio": asdict(ratio(wall, ours_wall)),
            "cpu_ratio": asdict(ratio(cpu, ours_cpu)),
            "steps": [asdict(record) for record in found],
        }
    return {
        "arms": arms,
        "mean_length": {
            arm: statistics.fmean(record.tokens for record in found) / num_completions
            for arm, found in records.items()
        },
    }
