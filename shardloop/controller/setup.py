"""Everything about a run that can be known, and refused, before a process starts. Floor 4.

`resolve` reads the model's folder, the task and the layouts, proves the reshard plan, and looks at
the prompts; `describe` prints the outcome.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

from shardloop import hf
from shardloop.config import DTypeName, TrainConfig
from shardloop.controller.placement import Placement
from shardloop.errors import LayoutError, TaskError
from shardloop.families import CanonicalModel, canonical_model
from shardloop.layout import Layout, make_layout, parse_layout
from shardloop.reshard.cost import cost
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import Proof, verify
from shardloop.rewards import load_reward
from shardloop.tasks import FiniteTask, evaluation_prompts, load_task, stop_token_ids
from shardloop.types import Prompt, RewardFn, Sampling, Task, Tokenizer

ITEMSIZE: Mapping[DTypeName, int] = {"float32": 4, "float64": 8, "bfloat16": 2}
MOST_CHECKED = 2_000
"""Training prompts that are tokenised and measured before the start."""


@dataclass(frozen=True, slots=True)
class Setup:
    config: TrainConfig
    model_dir: Path
    hf_config: Mapping[str, Any]
    tokenizer: Tokenizer
    task: Task
    reward: RewardFn
    reward_name: str
    test_prompts: Sequence[Prompt]
    src: Layout
    dst: Layout
    placement: Placement
    proof: Proof

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its completion together."""
        return int(self.hf_config["max_position_embeddings"])

    @property
    def sampling(self) -> Sampling:
        """How rollouts are drawn."""
        drawn = self.config.sampling
        return Sampling(
            max_tokens=drawn.max_tokens,
            temperature=drawn.temperature,
            top_p=drawn.top_p,
            top_k=drawn.top_k,
            stop_token_ids=stop_token_ids(self.task, self.tokenizer),
        )


def resolve(config: TrainConfig, model_dir: Path) -> Setup:
    """Reads, checks and plans; starts nothing and writes nothing.

    Raises:
        ModelError: the folder is no usable model. LayoutError: it cannot be cut so.
        TaskError: no prompts, or prompts that do not fit. UsageError: an unknown task or reward.
        PlanError: the reshard plan has a fault.
    """
    hf_config = hf.load_config(model_dir)
    tokenizer = hf.load_tokenizer(model_dir)
    model = canonical_model(hf_config)
    src = role_layout(
        model,
        config.trainer.layout,
        setting="trainer.layout",
        scheme="hf",
        axis="fsdp",
        example="fsdp=2",
    )
    dst = role_layout(
        model,
        config.engine.layout,
        setting="engine.layout",
        scheme="engine",
        axis="tp",
        example="engine:tp=2",
    )
    placement = Placement.of(
        trainers=src.world_size, engines=dst.world_size, colocate=config.workers.colocate
    )
    plan = plan_reshard(
        src, dst, src_ranks=placement.trainer_ranks, dst_ranks=placement.engine_ranks
    )
    task = load_task(config.task)
    reward_name = config.reward if config.reward is not None else task.default_reward
    reward = load_reward(reward_name, task=task)
    test_prompts = evaluation_prompts(task, count=config.eval.prompts)
    for prompt in (*test_prompts, *first_train_prompts(task, config)):
        check_prompt(prompt, tokenizer, config, hf_config)
    return Setup(
        config=config,
        model_dir=model_dir,
        hf_config=hf_config,
        tokenizer=tokenizer,
        task=task,
        reward=reward,
        reward_name=reward_name,
        test_prompts=test_prompts,
        src=src,
        dst=dst,
        placement=placement,
        proof=verify(plan),
    )


def role_layout(
    model: CanonicalModel, spec: str, *, setting: str, scheme: str, axis: str, example: str
) -> Layout:
    """The layout of one role; the trainer runs fsdp=N, the engine engine:tp=N."""
    parsed = parse_layout(spec)
    if parsed.scheme != scheme or [name for name, _ in parsed.axes] != [axis]:
        raise LayoutError(f"{setting}={spec}; it can be run only with axis {axis}, as {example}")
    return make_layout(model, spec)


def first_train_prompts(task: Task, config: TrainConfig) -> Sequence[Prompt]:
    """Every training prompt of a task that has few, the first step's of one that has many."""
    known = len(task.train) if isinstance(task, FiniteTask) else 0
    count = max(config.grpo.prompts_per_step, min(known, MOST_CHECKED))
    return task.prompts("train", seed=config.seed, start=0, count=count)


def check_prompt(
    prompt: Prompt, tokenizer: Tokenizer, config: TrainConfig, hf_config: Mapping[str, Any]
) -> None:
    length = len(tokenizer.encode_prompt(prompt))
    if length == 0:
        raise TaskError(f"prompt {prompt.uid!r} of task {config.task} is empty; give it some text")
    context = hf_config["max_position_embeddings"]
    if length + config.sampling.max_tokens > context:
        raise TaskError(
            f"prompt {prompt.uid!r} of task {config.task} has {length} tokens; with "
            f"sampling.max-tokens={config.sampling.max_tokens} the model's context of {context} "
            f"is exceeded: shorten it to {context - config.sampling.max_tokens} tokens"
        )


def describe(setup: Setup) -> str:
    """The resolved run, for people."""
    config, model = setup.config, setup.src.model
    num_parameters = sum(_volume(shape) for shape in model.tensor_shapes().values())
    example = setup.task.prompts("train", seed=config.seed, start=0, count=1)[0]
    batch = config.grpo.prompts_per_step * config.grpo.samples_per_prompt
    lines = [
        f"model      {setup.model_dir} ({setup.hf_config['model_type']}, "
        f"{num_parameters / 1e6:.2f} M parameters)",
        f"task       {setup.task.name}, judged by {setup.reward_name}; "
        f"e.g. {example.text or example.messages!r}",
        f"held out   {len(setup.test_prompts)} prompts",
        f"trainer    {setup.src.spec} on ranks {list(setup.placement.trainer_ranks)}",
        f"engine     {setup.dst.spec} on ranks {list(setup.placement.engine_ranks)}",
        f"batch      {config.grpo.prompts_per_step} prompts x "
        f"{config.grpo.samples_per_prompt} samples = {batch} completions, {config.steps} steps",
        f"plan       {setup.proof}",
        indent(str(cost(setup.proof.plan, itemsize=ITEMSIZE[config.engine.dtype])), " " * 11),
    ]
    return "\n".join(lines)


def _volume(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
