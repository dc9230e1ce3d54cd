"""Supervised steps on a task's worked solutions. Called by runs and by `shardloop sft`. Floor 4."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from shardloop.config import SFTConfig
from shardloop.controller.groups import WorkerGroup
from shardloop.errors import TaskError, UsageError
from shardloop.rl.batch import sft_batch
from shardloop.schedule import learning_rate
from shardloop.types import Prompt, Task, Tokenizer


def sft_steps(
    trainer: WorkerGroup, *, task: Task, tokenizer: Tokenizer, config: SFTConfig, seed: int
) -> Iterator[dict[str, Any]]:
    """Makes `config.steps` updates and yields the metrics of each. The loss is on the solution and
    the stop token, as a mean over the tokens of the whole batch.

    Raises:
        TaskError: a prompt has no worked solution. UsageError: the tokenizer has no stop token.
    """
    if not tokenizer.stop_token_ids:
        raise UsageError("the tokenizer has no end-of-sequence token; SFT teaches when to stop")
    for step in range(config.steps):
        prompts = task.prompts(
            "train",
            seed=stream_seed(seed, "sft"),
            start=step * config.batch_size,
            count=config.batch_size,
        )
        batch = sft_batch([solution_row(prompt, tokenizer) for prompt in prompts])
        metrics = trainer.call("forward_backward", batch, "sft", collect="sum")
        lr = learning_rate(step, config.steps, config.optim)
        update = trainer.call("step", lr, collect="same")
        yield {"step": step + 1, "lr": lr, **metrics, **update}


def solution_row(prompt: Prompt, tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]]:
    if prompt.solution is None:
        raise TaskError(
            f"prompt {prompt.uid!r} has no worked solution; SFT needs one: "
            "add a solution to the task, or set sft.steps to 0"
        )
    answer_ids = [*tokenizer.encode(prompt.solution), tokenizer.stop_token_ids[0]]
    return tokenizer.encode_prompt(prompt), answer_ids


def stream_seed(seed: int, stream: str) -> int:
    """A seed of its own for each stream of a run, so that SFT and RL draw different prompts."""
    digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1
