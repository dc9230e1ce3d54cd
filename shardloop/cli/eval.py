"""`shardloop eval`: reward of a model folder on a task's held-out prompts. Floor 5."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardloop import hf
from shardloop.builtin import temporary_model_folder
from shardloop.cli.options import SampleOptions
from shardloop.cli.view import set_up_logging
from shardloop.controller.evals import eval_interval, reward_fields
from shardloop.controller.inference import sampler_from_folder
from shardloop.controller.loop import evaluate
from shardloop.errors import UsageError
from shardloop.rewards import load_reward
from shardloop.tasks import Stops, env_maker, evaluation_prompts, load_task, stops_of


@dataclass(frozen=True, kw_only=True)
class EvalCommand:
    """Measure a model on held-out prompts: mean reward with a 95 % interval, and examples."""

    options: Annotated[SampleOptions, tyro.conf.arg(name="")]
    task: str
    """A built-in task, gym:NAME (a reasoning-gym generator), a JSONL of prompts and answers, or
    one of yours as package.module:function."""
    reward: str | None = None
    """A named reward, or package.module:function; by default the task's own."""
    prompts: int = 256
    """Held-out prompts (fewer where the task has fewer)."""
    show: int = 3
    """Examples to print."""


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(EvalCommand, prog="shardloop eval", args=list(arguments))
    set_up_logging(verbose=False)
    options = command.options
    demand_sensible(command)
    with temporary_model_folder(options.model, seed=options.seed) as model_dir:
        measure(command, model_dir)
    return 0


def demand_sensible(command: EvalCommand) -> None:
    """
    Raises:
        UsageError: a setting that needs no model to be refused.
    """
    if command.prompts < 1:
        raise UsageError(f"prompts={command.prompts}; choose 1 or more")
    if command.show < 0:
        raise UsageError(f"show={command.show}; choose 0 or more")
    command.options.sampling(Stops(token_ids=()))


def measure(command: EvalCommand, model_dir: Path) -> None:
    options, task = command.options, load_task(command.task)
    reward = load_reward(command.reward or task.default_reward, task=task)
    tokenizer = hf.load_tokenizer(model_dir)
    prompts = evaluation_prompts(task, count=command.prompts)
    with sampler_from_folder(
        model_dir,
        tokenizer=tokenizer,
        sampling=options.sampling(stops_of(task, tokenizer)),
        engine=options.engine,
        workers=options.workers,
        make_env=env_maker(task),
    ) as sampler:
        result = evaluate(sampler, prompts, reward=reward, seed=options.seed)
    for sample in result.samples[: command.show]:
        question = sample.prompt.text or sample.prompt.messages
        print(f"{question!r} -> {sample.marked!r}  reward {sample.reward.value:g}")
    record = {"prompts": len(prompts), **reward_fields("reward", list(result.rewards.values()))}
    print(f"reward {eval_interval(record, 'reward')} on {len(prompts)} held-out prompts (95 %)")
