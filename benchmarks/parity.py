"""Does our trainer learn what TRL's does? Reward against samples seen, for the same settings.

    python -m benchmarks.parity [--quick | --smoke] [--svg curve.svg] [--json parity.json]

The tiny model sorts six digits. From one supervised start, both make GRPO steps on the same prompts
in the same order: groups of the same size, the exact-match reward, the clipped loss as a mean over
all tokens, no KL term, AdamW at one constant rate. What differs is the sampling noise, and that
over several seeds is the yardstick. Needs the extra `peers`.

Parity is claimed when the 95 % interval of the difference of mean rewards over the last third of
the run holds 0, and is narrow: half of it is what could have gone unseen, and that must be less
than half of what both have learnt.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.measure import cpu_seconds, environment, print_table
from benchmarks.ours import make_engine, make_trainer, one_rank
from shardloop import hf
from shardloop.config import GRPOConfig, OptimConfig, TrainerConfig
from shardloop.intervals import T_95, Interval, t_interval
from shardloop.parallel.context import RankContext
from shardloop.rewards.exact import exact_reward
from shardloop.rl.advantages import grpo_advantages
from shardloop.rl.batch import make_batch, sft_batch
from shardloop.schedule import learning_rate
from shardloop.tasks.sort import sort_task
from shardloop.tiny import build_tiny
from shardloop.types import Completion, Prompt, Request, SampleId, Sampling, Tokenizer

MAX_TOKENS = 7
"""Six digits and the end-of-sequence token."""
CLIP = 0.2
TRAINER = TrainerConfig(layout="fsdp=1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    seeds: int
    steps: int
    prompts: int = 16
    samples: int = 8
    sft_steps: int = 100
    lr: float = 3e-4

    @property
    def samples_per_step(self) -> int:
        return self.prompts * self.samples

    @property
    def optim(self) -> OptimConfig:
        return OptimConfig(lr=self.lr, warmup_steps=0, beta2=0.999)


FULL = Size(seeds=5, steps=120)
QUICK = Size(seeds=1, steps=30)
SMOKE = Size(seeds=2, steps=3, prompts=2, samples=4, sft_steps=2)


def supervised_start(context: RankContext, folder: Path, size: Size) -> Path:
    """A tiny model that sorts some numbers already, so that groups have rewards of both kinds."""
    begin = build_tiny(folder / "begin", seed=0)
    tokenizer = hf.load_tokenizer(begin)
    optim = OptimConfig(lr=2e-3, warmup_steps=30)
    trainer = make_trainer(context, begin, config=TRAINER, optim=optim)
    batch_size = 64
    for step in range(size.sft_steps):
        prompts = sort_task().prompts("train", seed=1, start=step * batch_size, count=batch_size)
        rows = [
            (
                tokenizer.encode_prompt(prompt),
                [*tokenizer.encode(str(prompt.answer)), tokenizer.stop_token_ids[0]],
            )
            for prompt in prompts
        ]
        trainer.forward_backward(sft_batch(rows), "sft")
        trainer.step(learning_rate(step, size.sft_steps, optim))
    trainer.export(folder / "start")
    return folder / "start"


def prompts_of(size: Size, *, seed: int) -> Sequence[Prompt]:
    """Of all steps, in order, none of those of the supervised start's stream."""
    count = size.steps * size.prompts
    return sort_task().prompts("train", seed=100 + seed, start=0, count=count)


def train_ours(context: RankContext, start: Path, size: Size, *, seed: int) -> list[float]:
    """Mean reward of each step's samples."""
    tokenizer = hf.load_tokenizer(start)
    trainer = make_trainer(context, start, config=TRAINER, optim=size.optim)
    engine = make_engine(start, max_slots=size.samples_per_step)
    grpo = GRPOConfig(clip_low=CLIP, clip_high=CLIP, correction="none")
    prompts = prompts_of(size, seed=seed)
    curve = []
    for step in range(size.steps):
        chosen = prompts[step * size.prompts : (step + 1) * size.prompts]
        completions = engine.generate(
            requests_of(chosen, tokenizer, samples=size.samples, seed=seed * size.steps + step)
        )
        rewards_PG = rewards_of(chosen, completions, tokenizer).view(-1, size.samples)
        curve.append(rewards_PG.mean().item())
        if bool((rewards_PG == rewards_PG[:, :1]).all()):
            continue
        batch = make_batch(completions, grpo_advantages(rewards_PG).flatten())
        batch = replace(batch, old_N=trainer.logprobs(batch))
        trainer.forward_backward(batch, grpo)
        trainer.step(learning_rate(step, size.steps, size.optim))
        engine.load_from_state_dict(trainer.shards(), version=trainer.advance_version())
    return curve


def requests_of(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, samples: int, seed: int
) -> list[Request]:
    sampling = Sampling(max_tokens=MAX_TOKENS, stop_token_ids=tokenizer.stop_token_ids)
    return [
        Request(
            prompt_ids=tuple(tokenizer.encode_prompt(prompt)),
            sampling=sampling,
            sample_id=SampleId(prompt_uid=f"{place}/{prompt.uid}", index=index),
            seed=seed,
        )
        for place, prompt in enumerate(prompts)
        for index in range(samples)
    ]


def rewards_of(
    prompts: Sequence[Prompt], completions: Sequence[Completion], tokenizer: Tokenizer
) -> torch.Tensor:
    samples = len(completions) // len(prompts)
    return torch.tensor(
        [
            exact_reward(
                prompts[place // samples],
                tokenizer.decode(completion.token_ids_T),
                finished=completion.finish_reason == "stop",
            )
            for place, completion in enumerate(completions)
        ]
    )


def train_trl(start: Path, size: Size, *, seed: int, out: Path) -> list[float]:
    """As `train_ours`, by GRPOTrainer; it tokenizes the prompts itself, to the same ids."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig as TRLConfig
    from trl import GRPOTrainer

    stop = hf.load_tokenizer(start).stop_token_ids[0]
    rows = [prompt for prompt in prompts_of(size, seed=seed) for _ in range(size.samples)]
    curve: list[float] = []

    def reward(
        prompts: Sequence[str],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        **_: Any,
    ) -> list[float]:
        expected = rows[len(curve) * len(prompts) :][: len(prompts)]
        assert [prompt.text for prompt in expected] == list(prompts), "prompts in another order"
        rewards = [
            exact_reward(prompt, text, finished=ids[-1] == stop)
            for prompt, text, ids in zip(expected, completions, completion_ids, strict=True)
        ]
        curve.append(statistics.fmean(rewards))
        return rewards

    config = TRLConfig(
        output_dir=str(out),
        seed=seed,
        per_device_train_batch_size=size.samples_per_step,
        gradient_accumulation_steps=1,
        num_generations=size.samples,
        max_completion_length=MAX_TOKENS,
        max_steps=size.steps,
        learning_rate=size.lr,
        lr_scheduler_type="constant",
        adam_beta1=size.optim.beta1,
        adam_beta2=size.optim.beta2,
        adam_epsilon=size.optim.eps,
        max_grad_norm=size.optim.max_grad_norm,
        weight_decay=0.0,
        beta=0.0,
        loss_type="dapo",
        epsilon=CLIP,
        epsilon_high=CLIP,
        scale_rewards="group",
        temperature=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=hf.load_model(start, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(start),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": prompt.text} for prompt in prompts_of(size, seed=seed)]
        ),
    )
    trainer.train()
    return curve


def last_third(curve: Sequence[float]) -> float:
    return statistics.fmean(curve[-max(1, len(curve) // 3) :])


def first_ninth(curve: Sequence[float]) -> float:
    return statistics.fmean(curve[: max(1, len(curve) // 9)])


def difference_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """95 % interval of the difference of two means over seeds, by Welch's t."""
    spreads = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    value = statistics.fmean(ours) - statistics.fmean(theirs)
    if sum(spreads) == 0.0:
        return Interval(value, value, value)
    squares = sum(s**2 / (len(v) - 1) for s, v in zip(spreads, (ours, theirs), strict=True))
    degrees = max(1, math.floor(sum(spreads) ** 2 / squares))
    half = T_95[min(degrees, len(T_95)) - 1] * math.sqrt(sum(spreads))
    return Interval(value, value - half, value + half)


def verdict(curves: dict[str, list[list[float]]]) -> dict[str, Any]:
    """What the runs allow to say; with one seed each, nothing."""
    finals = {arm: [last_third(curve) for curve in found] for arm, found in curves.items()}
    if len(finals["ours"]) < 2:
        return {"text": "one seed has no spread: no claim; run without --quick"}
    gap = difference_interval(finals["ours"], finals["trl"])
    half = (gap.high - gap.low) / 2
    gain = min(
        statistics.fmean(finals[arm]) - statistics.fmean(first_ninth(c) for c in found)
        for arm, found in curves.items()
    )
    if not gap.low <= 0.0 <= gap.high:
        claim = "no parity: the interval does not hold 0"
    elif half >= gain / 2:
        claim = f"no claim: both have learnt {gain:.3f} at least, too little for this interval"
    else:
        claim = (
            f"parity: the interval holds 0, and half of it is {half / gain:.0%} of what was learnt"
        )
    return {
        "text": f"difference of mean reward, ours - trl: {gap}; {claim}",
        "parity": claim.startswith("parity"),
        "difference": asdict(gap),
        "gain": gain,
    }


def run(size: Size) -> dict[str, Any]:
    curves: dict[str, list[list[float]]] = {"ours": [], "trl": []}
    seconds = dict.fromkeys(curves, 0.0)
    with TemporaryDirectory(prefix="shardloop-bench-") as name, one_rank() as context:
        workdir = Path(name)
        start = supervised_start(context, workdir, size)
        for seed in range(size.seeds):
            began = cpu_seconds()
            curves["ours"].append(train_ours(context, start, size, seed=seed))
            between = cpu_seconds()
            curves["trl"].append(train_trl(start, size, seed=seed, out=workdir / "trl"))
            seconds["ours"] += between - began
            seconds["trl"] += cpu_seconds() - between
    finals = {arm: [last_third(curve) for curve in found] for arm, found in curves.items()}
    return {
        "benchmark": "parity",
        "environment": environment() | {p: version(p) for p in ("transformers", "trl")},
        "size": asdict(size),
        "samples_per_step": size.samples_per_step,
        "curves": curves,
        "last_third": finals,
        "cpu_s": seconds,
        "verdict": verdict(curves),
    }


def show(results: dict[str, Any]) -> None:
    print(f"environment: {results['environment']}")
    curves, per_step = results["curves"], results["samples_per_step"]
    num_steps = len(curves["ours"][0])
    width = max(1, num_steps // 9)
    rows = []
    for first in range(0, num_steps, width):
        cells = [
            mean_over_seeds([statistics.fmean(curve[first : first + width]) for curve in found])
            for found in curves.values()
        ]
        rows.append([min(num_steps, first + width) * per_step, *cells])
    print_table(["samples seen", *curves], rows)
    for arm, values in results["last_third"].items():
        print(f"{arm}: last third {mean_over_seeds(values)}, {results['cpu_s'][arm]:.1f} CPU s")
    print(results["verdict"]["text"])


def mean_over_seeds(values: Sequence[float]) -> str:
    return str(t_interval(values)) if len(values) > 1 else f"{values[0]:.3f}"


def draw(results: dict[str, Any], path: Path) -> None:
    """Every seed's curve thin, the mean thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for color, (arm, curves) in zip(("C0", "C1"), results["curves"].items(), strict=True):
        seen = [(step + 1) * results["samples_per_step"] for step in range(len(curves[0]))]
        for curve in curves:
            axes.plot(seen, curve, color=color, alpha=0.3, linewidth=0.8)
        mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
        axes.plot(seen, mean, color=color, label=arm)
    axes.set_xlabel("samples seen")
    axes.set_ylabel("reward per sample")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="benchmarks.parity", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one seed, fewer steps: no claim")
    parser.add_argument("--smoke", action="store_true", help="a few steps: does it run at all?")
    parser.add_argument("--svg", type=Path, help="draw the curves there")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = run(SMOKE if args.smoke else QUICK if args.quick else FULL)
    show(results)
    if args.svg is not None:
        draw(results, args.svg)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return results


if __name__ == "__main__":
    main()
