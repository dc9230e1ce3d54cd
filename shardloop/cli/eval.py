"""`shardloop eval`: reward of a model folder on a task's held-out prompts. Floor 5."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from shardloop import hf
from shardloop.cli.view import set_up_logging
from shardloop.config import EngineConfig, WorkersConfig
from shardloop.controller.inference import engine_from_folder
from shardloop.controller.intervals import eval_interval, reward_fields
from shardloop.controller.loop import evaluate
from shardloop.controller.run import model_folder
from shardloop.rewards import load_reward
from shardloop.tasks import evaluation_prompts, load_task, stop_token_ids
from shardloop.types import Sampling


@dataclass(frozen=True, kw_only=True)
class EvalCommand:
    """Measure a model on held-out prompts: mean reward with a 95 % interval, and examples."""

    model: str
    """A built-in model (tiny, smollm2) or a Llama, Qwen2 or Qwen3 folder (Hugging Face format)."""
    task: str
    """A built-in task, gym:NAME (a reasoning-gym generator), or a JSONL of prompts and answers."""
    reward: str | None = None
    """A named reward, or package.module:function; by default the task's own."""
    prompts: int = 256
    """Held-out prompts (fewer where the task has fewer)."""
    max_tokens: int = 16
    """Most tokens of a completion, stop token included."""
    temperature: float = 0.0
    """0 takes the likeliest token each time (greedy)."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    seed: int = 0
    """Seed of the sampling noise."""
    show: int = 3
    """Examples to print."""
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(layout="engine:tp=1"))
    workers: WorkersConfig = field(default_factory=WorkersConfig)


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(EvalCommand, prog="shardloop eval", args=list(arguments))
    set_up_logging(verbose=False)
    with tempfile.TemporaryDirectory() as temporary:
        model_dir = model_folder(command.model, Path(temporary), seed=command.seed, say=print)
        report(command, model_dir)
    return 0


def report(command: EvalCommand, model_dir: Path) -> None:
    task = load_task(command.task)
    reward = load_reward(command.reward or task.default_reward, task=task)
    tokenizer = hf.load_tokenizer(model_dir)
    prompts = evaluation_prompts(task, count=command.prompts)
    sampling = Sampling(
        max_tokens=command.max_tokens,
        temperature=command.temperature,
        top_p=command.top_p,
        top_k=command.top_k,
        stop_token_ids=stop_token_ids(task, tokenizer),
    )
    with engine_from_folder(model_dir, command.engine, command.workers) as engine:
        result = evaluate(
            engine=engine,
            prompts=prompts,
            reward=reward,
            tokenizer=tokenizer,
            sampling=sampling,
            context_length=hf.load_config(model_dir)["max_position_embeddings"],
            seed=command.seed,
        )
    for sample in result.samples[: command.show]:
        question = sample.prompt.text or sample.prompt.messages
        print(f"{question!r} -> {sample.text!r}  reward {sample.reward.value:g}")
    record = {"prompts": len(prompts), **reward_fields("reward", list(result.means.values()))}
    print(f"reward {eval_interval(record, 'reward')} on {len(prompts)} held-out prompts (95 %)")
