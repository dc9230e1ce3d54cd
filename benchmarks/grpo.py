"""One GRPO step on mixed lengths: ours, a padded loop, and TRL.

    python -m benchmarks.grpo [--quick | --full | --smoke] [--part train | whole]

train   given completions of lognormal lengths, old log-probs and advantages: gradients and one
        AdamW step. Loss and gradients of all arms are asserted equal before anything is timed.
whole   generation, rewards, training and the new weights in the engine, against GRPOTrainer as it
        is shipped, on a model whose weights alone make the lengths (geometric): the two draw from
        one distribution.

Float32 on one thread; arms run in turn in one process. Needs the extra `peers` for TRL.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.load import Load
from benchmarks.measure import (
    Timings,
    environment,
    gemm_flops_per_s,
    interleaved,
    print_table,
    ratio,
    require_quiet,
)
from benchmarks.models import ModelSize, write_model
from benchmarks.ours import make_trainer, one_rank
from benchmarks.peer_trainers import CLIP, LR, Given, PaddedLoop, TRLStep
from benchmarks.whole_step import WholeSize, run_whole
from shardloop import hf
from shardloop.config import GRPOConfig, OptimConfig, TrainerConfig
from shardloop.parallel.context import RankContext
from shardloop.rl.batch import Batch
from shardloop.trainer import Trainer

RTOL = 1e-5
"""Of the loss, and of the norm of the difference of each gradient to that of the padded loop."""
OFF_POLICY = 0.2
"""Standard deviation of old minus new log-probs: about a third of the ratios are clipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How long a benchmark takes."""

    model: ModelSize
    load: Load
    whole: WholeSize
    rounds: int


FULL = Size(
    model=ModelSize(),
    load=Load(prompts=32, samples=8, prompt_tokens=64, median=64, sigma=1.0, cap=512, vocab=32_000),
    whole=WholeSize(prompts=32, samples=8, prompt_tokens=64, mean_length=64, cap=256, rounds=5),
    rounds=5,
)
DEFAULT = replace(FULL, load=replace(FULL.load, prompts=8), whole=replace(FULL.whole, prompts=8))
QUICK = replace(
    FULL,
    load=replace(FULL.load, prompts=4),
    whole=replace(FULL.whole, prompts=4, rounds=3),
    rounds=3,
)
SMOKE = Size(
    model=ModelSize(layers=1, width=64, heads=2, kv_heads=1, ffn=96, vocab=200, context=128),
    load=Load(prompts=2, samples=8, prompt_tokens=8, median=8, sigma=1.0, cap=24, vocab=200),
    whole=WholeSize(prompts=2, samples=8, prompt_tokens=8, mean_length=8, cap=24, rounds=1),
    rounds=1,
)


def make_given(load: Load, folder: Path) -> Given:
    """Random completions of the load's lengths, with the model's log-probs and some noise."""
    generator = torch.Generator().manual_seed(load.seed + 2)
    prompts = [ids for ids in load.prompt_ids() for _ in range(load.samples)]
    completions = [
        torch.randint(3, load.vocab, (length,), generator=generator).tolist()
        for length in load.lengths()
    ]
    model = hf.load_model(folder, dtype=torch.float32).eval()
    old = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([*prompt, *completion])
        with torch.no_grad():
            logits_TV = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        new_T = logits_TV.log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        old.append((new_T + OFF_POLICY * torch.randn(new_T.shape, generator=generator)).tolist())
    advantages = torch.randn(len(prompts), generator=generator).tolist()
    return Given(prompts=prompts, completions=completions, advantages=advantages, old=old)


def as_batch(given: Given) -> Batch:
    rows = list(zip(given.prompts, given.completions, strict=True))

    def flat(values: Sequence[Sequence[float]]) -> Tensor:
        pairs = zip(given.prompts, values, strict=True)
        return torch.tensor([v for p, row in pairs for v in [*[0.0] * len(p), *row]])

    lengths = [len(prompt) + len(completion) for prompt, completion in rows]
    scores = zip(given.advantages, given.completions, strict=True)
    return Batch(
        token_ids_N=torch.tensor([t for prompt, answer in rows for t in [*prompt, *answer]]),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        loss_mask_N=flat([[1.0] * len(row) for row in given.completions]) > 0,
        advantages_N=flat([[value] * len(row) for value, row in scores]),
        old_N=flat(given.old),
    )


class OurStep:
    def __init__(self, trainer: Trainer, given: Given) -> None:
        self._trainer, self._batch = trainer, as_batch(given)
        self._loss = GRPOConfig(clip_low=CLIP, clip_high=CLIP, correction="none")

    def __call__(self) -> None:
        self.forward_backward()
        self._trainer.step(LR)

    def forward_backward(self) -> float:
        return self._trainer.forward_backward(self._batch, self._loss)["loss"]

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: parameter.grad.full_tensor()
            for name, parameter in self._trainer._policy.named_parameters()
        }


def assert_equal(arms: dict[str, Any], *, reference: str) -> dict[str, float]:
    """Loss and gradients of every arm are those of the reference's; the largest relative difference
    of each arm. Leaves the arms' gradients as they were: our next pass would add to them."""
    loss = arms[reference].forward_backward()
    gradients = {name: grad.clone() for name, grad in arms[reference].gradients().items()}
    worst = {}
    for arm, step in arms.items():
        if arm == reference:
            continue
        found = step.forward_backward()
        difference = abs(found - loss) / abs(loss)
        for name, grad in step.gradients().items():
            wanted = gradients[name]
            difference = max(difference, float((grad - wanted).norm() / wanted.norm()))
        assert difference <= RTOL, f"{arm}: loss or gradients differ by {difference:.1e}"
        worst[arm] = difference
    return worst


def run_train(size: Size, context: RankContext, workdir: Path) -> dict[str, Any]:
    folder = write_model(workdir / "model", size.model)
    given = make_given(size.load, folder)
    trainer = make_trainer(
        context, folder, config=TrainerConfig(layout="fsdp=1"), optim=OptimConfig()
    )
    ours = OurStep(trainer, given)
    arms: dict[str, Any] = {"ours": ours, "padded loop": PaddedLoop(folder, given)}
    for name, checkpointing in (("trl", True), ("trl, no checkpointing", False)):
        arms[name] = TRLStep(folder, given, out=workdir / "trl", checkpointing=checkpointing)
    worst = assert_equal(arms, reference="padded loop")
    trainer.step(0.0)
    timings = interleaved(arms, size.rounds)
    return {
        "largest_relative_difference": worst,
        "tokens": given.num_tokens,
        "scored_tokens": given.num_scored,
        "arms": summary(timings, tokens=given.num_tokens),
        "limit": limit_of(size, given, cpu_s=statistics.median(timings["ours"].cpu_s)),
    }


def summary(timings: dict[str, Timings], *, tokens: int) -> dict[str, Any]:
    ours = timings["ours"]
    return {
        name: {
            "tokens_per_s": tokens / statistics.median(timing.wall_s),
            "cpu_s": statistics.median(timing.cpu_s),
            "wall_ratio": asdict(ratio(timing.wall_s, ours.wall_s)),
            "cpu_ratio": asdict(ratio(timing.cpu_s, ours.cpu_s)),
            "timings": asdict(timing),
        }
        for name, timing in timings.items()
    }


def limit_of(size: Size, given: Given, *, cpu_s: float) -> dict[str, float]:
    """Three forward passes' worth of products (one forward, two backward) at this machine's speed;
    the head's only where a token is scored."""
    flops = 3 * size.model.flops(num_tokens=given.num_tokens, num_scored=given.num_scored)
    share = given.num_scored / given.num_tokens
    rows = min(2048, given.num_tokens)
    shapes = size.model.gemm_shapes(rows, num_scored=max(1, int(rows * share)))
    rate = gemm_flops_per_s(shapes)
    return {"flops": flops, "gemm_flops_per_s": rate, "share": flops / rate / cpu_s}


def show_arms(arms: dict[str, Any]) -> None:
    def times(found: dict[str, float]) -> str:
        return f"{found['median']:.2f} ({found['low']:.2f}..{found['high']:.2f})"

    print_table(
        ["arm", "tokens/s", "CPU s", "arm/ours, wall", "arm/ours, CPU"],
        [
            [
                name,
                f"{arm['tokens_per_s']:.0f}",
                f"{arm['cpu_s']:.2f}",
                times(arm["wall_ratio"]),
                times(arm["cpu_ratio"]),
            ]
            for name, arm in arms.items()
        ],
    )


def show(results: dict[str, Any]) -> None:
    print(f"environment: {results['environment']}")
    if "train" in results:
        train, limit = results["train"], results["train"]["limit"]
        print(f"\ntrain step: {train['tokens']} tokens, {train['scored_tokens']} of them scored")
        print(f"loss and gradients differ by at most {train['largest_relative_difference']}")
        show_arms(train["arms"])
        print(
            f"products alone: {limit['flops'] / 1e9:.0f} GFLOP at "
            f"{limit['gemm_flops_per_s'] / 1e9:.0f} GFLOP/s, {limit['share']:.0%} of our CPU s"
        )
    if "whole" in results:
        whole = results["whole"]
        print("\nwhole step, by completion token: lengths that differ by chance do not count")
        show_arms(whole["arms"])
        print(f"mean length of a completion: {whole['mean_length']}")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="benchmarks.grpo", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="4 prompts x 8, 3 rounds")
    parser.add_argument("--full", action="store_true", help="32 prompts x 8, 5 rounds: an hour")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: does it run at all?")
    parser.add_argument("--part", choices=("train", "whole"), help="only this one")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    size = SMOKE if args.smoke else QUICK if args.quick else FULL if args.full else DEFAULT
    if not (args.anyway or args.smoke):
        require_quiet(1.5)
    results: dict[str, Any] = {
        "benchmark": "grpo",
        "environment": environment() | {p: version(p) for p in ("transformers", "trl")},
        "size": asdict(size),
    }
    parts: dict[str, Callable[[RankContext, Path], dict[str, Any]]] = {
        "train": lambda context, workdir: run_train(size, context, workdir),
        "whole": lambda context, workdir: run_whole(size.model, size.whole, context, workdir),
    }
    with TemporaryDirectory(prefix="shardloop-bench-") as name, one_rank() as context:
        for part, work in parts.items():
            if args.part in (None, part):
                results[part] = work(context, Path(name) / part)
    show(results)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return results


if __name__ == "__main__":
    main()
