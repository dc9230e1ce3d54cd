"""Vetted settings by name: where a run starts and what command-line flags change. Floor 0."""

from shardloop.config import (
    CheckpointConfig,
    EngineConfig,
    EvalConfig,
    GRPOConfig,
    OptimConfig,
    SamplingConfig,
    SFTConfig,
    TrainConfig,
    TrainerConfig,
)

TINY = TrainConfig(
    model="tiny",
    task="sort",
    steps=150,
    # Six digits and the end-of-sequence token.
    sampling=SamplingConfig(max_tokens=7),
    grpo=GRPOConfig(prompts_per_step=16, samples_per_prompt=16, kl_coef=0.001),
    # 1e-3 makes the reward fall.
    optim=OptimConfig(lr=3e-4, schedule="cosine"),
    trainer=TrainerConfig(layout="fsdp=2"),
    engine=EngineConfig(layout="engine:tp=2"),
    # At a constant rate: a decay makes a warm start so sure of itself that little is left to learn.
    sft=SFTConfig(steps=100, batch_size=64, optim=OptimConfig(lr=2e-3, warmup_steps=30)),
    eval=EvalConfig(prompts=256, every=25),
)
"""Sorting six digits by 0.1 M parameters: a supervised warm start, then GRPO; minutes on a CPU."""

SMOLLM2 = TrainConfig(
    model="smollm2",
    task="addition",
    steps=32,
    # Two digits and the newline that ends the answer.
    sampling=SamplingConfig(max_tokens=3),
    grpo=GRPOConfig(prompts_per_step=4, samples_per_prompt=6),
    optim=OptimConfig(lr=1e-5),
    trainer=TrainerConfig(layout="fsdp=2"),
    # Nine query heads and three kv heads: tensor parallelism 1 or 3.
    engine=EngineConfig(layout="engine:tp=1", max_slots=32),
    # All the held-out pairs there are.
    eval=EvalConfig(prompts=26, every=8),
    checkpoint=CheckpointConfig(every=0),
)
"""Single-digit addition by a pretrained model of 135 M parameters, without a supervised start."""

CALCULATOR = TrainConfig(
    model="tiny",
    task="calculator",
    steps=60,
    # Two calls and the answer: at most 16.
    sampling=SamplingConfig(max_tokens=20),
    grpo=GRPOConfig(prompts_per_step=16, samples_per_prompt=16),
    optim=OptimConfig(lr=3e-4, schedule="cosine"),
    trainer=TrainerConfig(layout="fsdp=2"),
    engine=EngineConfig(layout="engine:tp=2"),
    # Enough to call correctly in about half of the samples; the others guess.
    sft=SFTConfig(steps=250, batch_size=64, optim=OptimConfig(lr=2e-3, warmup_steps=30)),
    eval=EvalConfig(prompts=256, every=20),
)
"""Arithmetic by 0.1 M parameters with a calculator: GRPO finds that calling it pays."""

PRESETS: dict[str, TrainConfig] = {"tiny": TINY, "smollm2": SMOLLM2, "calculator": CALCULATOR}
