"""`shardloop generate`: complete prompts with the tensor-parallel engine. Floor 5."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from shardloop import hf
from shardloop.cli.view import set_up_logging
from shardloop.config import EngineConfig, WorkersConfig
from shardloop.controller.inference import engine_from_folder
from shardloop.controller.rollouts import rollout
from shardloop.controller.run import model_folder
from shardloop.errors import UsageError
from shardloop.types import Prompt, Sampling


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Complete prompts with a model folder, by our own engine."""

    model: str
    """A built-in model (tiny, smollm2) or a Llama, Qwen2 or Qwen3 folder (Hugging Face format)."""
    prompt: tuple[str, ...]
    """One or more texts to complete; \\n stands for a newline."""
    chat: bool = False
    """Put each text through the model's chat template, as a user's message."""
    samples: int = 1
    """Completions of each prompt."""
    max_tokens: int = 64
    """Most tokens of a completion, stop token included."""
    temperature: float = 0.0
    """0 takes the likeliest token each time (greedy)."""
    top_p: float = 1.0
    """Nucleus mass in (0, 1]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    seed: int = 0
    """Seed of the sampling noise."""
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(layout="engine:tp=1"))
    workers: WorkersConfig = field(default_factory=WorkersConfig)


def run(arguments: Sequence[str]) -> int:
    command = tyro.cli(GenerateCommand, prog="shardloop generate", args=list(arguments))
    set_up_logging(verbose=False)
    if not command.prompt:
        raise UsageError("--prompt is missing; give one or more texts")
    if command.samples < 1:
        raise UsageError(f"samples={command.samples}; choose 1 or more")
    with tempfile.TemporaryDirectory() as temporary:
        model_dir = model_folder(command.model, Path(temporary), seed=command.seed, say=print)
        print_completions(command, model_dir)
    return 0


def print_completions(command: GenerateCommand, model_dir: Path) -> None:
    tokenizer = hf.load_tokenizer(model_dir)
    sampling = Sampling(
        max_tokens=command.max_tokens,
        temperature=command.temperature,
        top_p=command.top_p,
        top_k=command.top_k,
        stop_token_ids=tokenizer.stop_token_ids,
    )
    prompts = [
        to_prompt(text, uid=str(i), chat=command.chat) for i, text in enumerate(command.prompt)
    ]
    with engine_from_folder(model_dir, command.engine, command.workers) as engine:
        groups = rollout(
            engine,
            prompts,
            samples_per_prompt=command.samples,
            sampling=sampling,
            tokenizer=tokenizer,
            seed=command.seed,
            context_length=hf.load_config(model_dir)["max_position_embeddings"],
        )
    for group in groups:
        for completion in group.completions:
            text = tokenizer.decode(completion.token_ids_T)
            logprob = sum(completion.full_T)
            print(f"[{completion.finish_reason}, log-prob {logprob:.2f}] {text}")


def to_prompt(text: str, *, uid: str, chat: bool) -> Prompt:
    text = text.replace("\\n", "\n")
    if chat:
        return Prompt(uid=uid, messages=({"role": "user", "content": text},))
    return Prompt(uid=uid, text=text)
