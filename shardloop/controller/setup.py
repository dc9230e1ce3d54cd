"""Everything about a run that can be known, and refused, before a process starts. Floor 4.

Called by `controller.run`; `read_model` and `engine_layout` also by what runs a part of a run alone
(`controller.sft`, `controller.inference`). `resolve` reads the model's folder, the task and the
layouts, proves the reshard plan, looks at the prompts, and tries environment and reward (`trials`).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardloop import hf
from shardloop.config import TrainConfig, TrainerConfig
from shardloop.controller.demands import (
    demand_buffer,
    demand_devices,
    demand_transport,
    demand_zero_gap,
)
from shardloop.controller.engines import Engines
from shardloop.controller.placement import Placement
from shardloop.controller.rollouts import Sampler, prompt_ids, solution_row
from shardloop.controller.trials import try_env, try_reward
from shardloop.errors import LayoutError, ModelError
from shardloop.families import CanonicalModel, canonical_model
from shardloop.layout import Layout, make_layout, parse_layout
from shardloop.model import DecoderConfig
from shardloop.parallel.build import check_config
from shardloop.parallel.mesh import check_tensor_parallel, trainer_axes
from shardloop.reshard.plan import plan_reshard
from shardloop.reshard.verify import Proof, verify
from shardloop.rewards import REWARDS, check_answer, load_reward
from shardloop.tasks import (
    FiniteTask,
    UserTask,
    env_maker,
    evaluation_prompts,
    load_task,
    stops_of,
)
from shardloop.types import Prompt, RewardFn, Sampling, Task, Tokenizer

MOST_CHECKED = 10_000
"""Training prompts that are looked at before the start: tokenised, measured, their answers read."""
MOST_PROCESSES = max(64, 8 * (os.cpu_count() or 1))
"""All ranks are processes of this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What config.json says, once it is known that trainer and engine can run the model."""

    hf_config: Mapping[str, Any]
    canonical: CanonicalModel
    context_length: int
    """Most tokens of a prompt and its completion together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    config: TrainConfig
    model_dir: Path
    model: ModelFacts
    tokenizer: Tokenizer
    task: Task
    reward: RewardFn
    reward_name: str
    test_prompts: Sequence[Prompt]
    placement: Placement
    proof: Proof

    @property
    def sampling(self) -> Sampling:
        """How rollouts are drawn."""
        drawn, stops = self.config.sampling, stops_of(self.task, self.tokenizer)
        return Sampling(
            max_tokens=drawn.max_tokens,
            temperature=drawn.temperature,
            top_p=drawn.top_p,
            top_k=drawn.top_k,
            min_p=drawn.min_p,
            stop_token_ids=stops.token_ids,
            stop=tuple(dict.fromkeys((*stops.texts, *drawn.stop))),
        )

    def sampler(self, engine: Engines) -> Sampler:
        return Sampler(
            engine=engine,
            tokenizer=self.tokenizer,
            sampling=self.sampling,
            context_length=self.model.context_length,
            make_env=env_maker(self.task),
        )


def read_model(model_dir: Path) -> ModelFacts:
    """
    Raises:
        ModelError: the folder is no usable model, or one with settings that we cannot run.
    """
    hf_config = hf.load_config(model_dir)
    try:
        decoder = DecoderConfig.from_hf(hf_config)
    except ModelError as error:
        raise ModelError(f"{model_dir}: {error}") from error
    return ModelFacts(
        hf_config=hf_config,
        canonical=canonical_model(hf_config),
        context_length=decoder.max_positions,
    )


def resolve(config: TrainConfig, model_dir: Path) -> Setup:
    """Reads, checks and plans; starts nothing and writes nothing.

    Raises:
        ModelError: the folder is no usable model. LayoutError: it cannot be cut so.
        TaskError: no prompts, prompts that do not fit, or an environment that fails.
        UsageError: an unknown task or reward, settings that do not go together, or too few GPUs.
        RewardError: the user's reward or environment fails when tried on empty text.
        PlanError: the reshard plan has a fault.
    """
    demand_buffer(config)
    model = read_model(model_dir)
    tokenizer = hf.load_tokenizer(model_dir)
    src = trainer_layout(model.canonical, config.trainer)
    dst = engine_layout(model.canonical, config.engine.layout)
    placement = _place(src, dst, colocate=config.workers.colocate)
    demand_zero_gap(config, trainer=src, engine=dst)
    demand_transport(config, engine=dst)
    demand_devices(config.workers, num_ranks=placement.world_size)
    plan = plan_reshard(
        src, dst, src_ranks=placement.trainer_ranks, dst_ranks=placement.engine_ranks
    )
    task = load_task(config.task)
    reward_name = config.reward if config.reward is not None else task.default_reward
    setup = Setup(
        config=config,
        model_dir=model_dir,
        model=model,
        tokenizer=tokenizer,
        task=task,
        reward=load_reward(reward_name, task=task),
        reward_name=reward_name,
        test_prompts=evaluation_prompts(task, count=config.eval.prompts),
        placement=placement,
        proof=verify(plan),
    )
    check_prompts(setup)
    return setup


def _place(src: Layout, dst: Layout, *, colocate: bool) -> Placement:
    trainers, engines = src.world_size, dst.world_size
    num_processes = max(trainers, engines) if colocate else trainers + engines
    if num_processes > MOST_PROCESSES:
        raise LayoutError(
            f"trainer.layout={src.spec} and engine.layout={dst.spec} need {num_processes} processes"
            f" on this machine; choose layouts of at most {MOST_PROCESSES} together"
        )
    return Placement.of(
        trainers=trainers,
        engines=engines,
        colocate=colocate,
        num_replicas=num_replicas(dst.spec),
    )


def check_prompts(setup: Setup) -> None:
    """Whether the prompts that a run meets first can be asked, judged and, in SFT, imitated, and
    the user's reward and the environment do on the first of them.

    Raises:
        UsageError: sampling.max-tokens fills the context. ModelError: no token ends an answer, or
            the chat template fails. TaskError: names the first prompt that cannot be used, or the
            environment fails. RewardError: the user's reward fails.
    """
    config, tokenizer = setup.config, setup.tokenizer
    context_length = setup.model.context_length
    max_tokens = setup.sampling.max_tokens
    train_prompts = first_train_prompts(setup.task, config)
    for prompt in (*setup.test_prompts, *train_prompts):
        prompt_ids(prompt, tokenizer, max_tokens=max_tokens, context_length=context_length)
        if setup.reward_name in REWARDS:
            check_answer(setup.reward, prompt)
    if config.sft.steps > 0:
        for prompt in train_prompts:
            solution_row(prompt, tokenizer, context_length)
    [first] = setup.task.prompts("train", seed=config.seed, start=0, count=1)
    try_env(
        env_maker(setup.task),
        first,
        prompt_ids(first, tokenizer, max_tokens=max_tokens, context_length=context_length),
        sampling=setup.sampling,
        tokenizer=tokenizer,
        context_length=context_length,
    )
    if setup.reward_name not in REWARDS:
        try_reward(setup.reward, setup.reward_name, first)


def trainer_layout(model: CanonicalModel, trainer: TrainerConfig) -> Layout:
    """
    Raises:
        LayoutError: not a layout that the trainer runs (see `trainer_axes`), or it does not fit.
        UsageError: other settings do not go with it.
    """
    axes = trainer_axes(trainer.layout)
    check_tensor_parallel(model, axes["tp"])
    check_config(trainer, has_tp=axes["tp"] > 1)
    return make_layout(model, trainer.layout)


def engine_layout(model: CanonicalModel, spec: str) -> Layout:
    """
    Raises:
        LayoutError: no engine layout with its replicas outermost, or a tp that does not fit the
            model.
    """
    parsed = parse_layout(spec)
    axes = [name for name, _ in parsed.axes]
    if parsed.scheme != "engine" or axes not in (["tp"], ["replicas"], ["replicas", "tp"]):
        raise LayoutError(
            f"engine.layout={spec!r} cannot be run; choose engine:tp=N (the model cut N ways), or "
            "engine:replicas=R,tp=N (R copies of it, each cut N ways)"
        )
    return make_layout(model, spec)


def num_replicas(spec: str) -> int:
    """Of an engine layout: groups of ranks that hold the whole model and sample on their own."""
    return parse_layout(spec).size("replicas")


def first_train_prompts(task: Task, config: TrainConfig) -> Sequence[Prompt]:
    """Every training prompt of a task that has few, or else those of a run's beginning."""
    known = len(task.train) if isinstance(task, FiniteTask | UserTask) else 0
    count = config.grpo.prompts_per_step
    if known > MOST_CHECKED:
        count *= config.steps * (config.grpo.resample_rounds + 1)
    elif known:
        count = known
    return task.prompts("train", seed=config.seed, start=0, count=min(count, MOST_CHECKED))
