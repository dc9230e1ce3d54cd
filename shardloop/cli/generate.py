"""`shardloop generate`: complete prompts with the tensor-parallel engine. Floor 5."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardloop import hf
from shardloop.builtin import temporary_model_folder
from shardloop.cli.options import SampleOptions
from shardloop.cli.view import set_up_logging
from shardloop.controller.inference import sampler_from_folder
from shardloop.errors import UsageError
from shardloop.tasks import Stops
from shardloop.types import Prompt


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SampleOptions):
    max_tokens: int = 64
    """Most tokens of a completion, stop token included."""


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Complete prompts with a model folder, by our own engine: no task, one turn."""

    options: Annotated[GenerateOptions, tyro.conf.arg(name="")]
    prompt: tuple[str, ...]
    """One or more texts to complete; \\n stands for a newline."""
    chat: bool = False
    """Put each text through the model's chat template, as a user's message."""
    samples: int = 1
    """Completions of each prompt. Before each stand, in brackets, how it ended (stop: by itself;
    length: cut off by max-tokens) and its log-prob: the sum over its tokens, stop token included,
    at the temperature it was drawn with (1 if greedy)."""


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(GenerateCommand, prog="shardloop generate", args=list(arguments))
    set_up_logging(verbose=False)
    if not command.prompt:
        raise UsageError("--prompt is missing; give one or more texts")
    if command.samples < 1:
        raise UsageError(f"samples={command.samples}; choose 1 or more")
    options = command.options
    options.sampling(Stops(token_ids=()))  # refuses bad values before anything is loaded
    with temporary_model_folder(options.model, seed=options.seed) as model_dir:
        print_completions(command, model_dir)
    return 0


def print_completions(command: GenerateCommand, model_dir: Path) -> None:
    options = command.options
    tokenizer = hf.load_tokenizer(model_dir)
    prompts = [
        to_prompt(text, uid=str(i), chat=command.chat) for i, text in enumerate(command.prompt)
    ]
    with sampler_from_folder(
        model_dir,
        tokenizer=tokenizer,
        sampling=options.sampling(Stops(token_ids=tokenizer.stop_token_ids)),
        engine=options.engine,
        workers=options.workers,
    ) as sampler:
        rollouts = sampler.rollout(prompts, samples_per_prompt=command.samples, seed=options.seed)
    for rollout, text in zip(rollouts, command.prompt, strict=True):
        print(f"prompt {text!r}")
        for completion in rollout.completions:
            answer = tokenizer.decode(completion.token_ids_T)
            logprob = sum(completion.full_T)
            print(f"[{completion.finish_reason}, log-prob {logprob:.2f}] {answer}")


def to_prompt(text: str, *, uid: str, chat: bool) -> Prompt:
    text = text.replace("\\n", "\n")
    if chat:
        return Prompt(uid=uid, messages=({"role": "user", "content": text},))
    return Prompt(uid=uid, text=text)
