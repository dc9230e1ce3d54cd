"""Speed and memory of the head: ours, plain full logits, and TRL's fused head if it is installed.

    python -m benchmarks.head [--quick | --smoke]

Every arm computes the log-prob of each target and the entropy, then the gradients of hidden states
and weight. Before anything is timed, values and gradients of all arms must agree. Plain full logits
are written as sparingly as autograd allows: no tensor is kept that it does not need.
Float32, on one thread.

Shapes: n tokens · V vocabulary · D width.
"""

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import (
    MIB,
    environment,
    gemm_flops_per_s,
    interleaved,
    memory_bytes_per_s,
    peak_extra_bytes,
    print_table,
    ratio,
    require_quiet,
)
from shardloop import head

TEMPERATURE = 0.9
RTOL = 1e-5
FLOAT32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    vocab: int
    width: int
    num_tokens: int
    entropy_coef: float = 0.0
    """0: the entropy is a metric, without a gradient."""
    peers: bool = True

    def __str__(self) -> str:
        bonus = ", entropy bonus" if self.entropy_coef else ""
        return f"V={self.vocab:,} D={self.width:,} n={self.num_tokens:,}{bonus}"


SMOKE = [Case(vocab=101, width=8, num_tokens=33, entropy_coef=0.1)]
QUICK = [Case(vocab=151_936, width=256, num_tokens=2048, peers=False)]
FULL = [
    Case(vocab=32_000, width=256, num_tokens=2048),
    Case(vocab=32_000, width=256, num_tokens=2048, entropy_coef=0.01),
    Case(vocab=151_936, width=256, num_tokens=2048),
    Case(vocab=151_936, width=1024, num_tokens=2048),
]
LARGE_NUM_TOKENS = 8192
"""Memory is also computed for so many tokens, where full logits need not fit this machine."""

Values = tuple[Tensor, Tensor]
Scorer = Callable[[Tensor, Tensor, Tensor], Values]


def ours(hidden_nD: Tensor, weight_VD: Tensor, targets_n: Tensor) -> Values:
    return head.token_logprobs(hidden_nD, weight_VD, targets_n, temperature=TEMPERATURE)


def naive(hidden_nD: Tensor, weight_VD: Tensor, targets_n: Tensor) -> Values:
    return full_logits(hidden_nD, weight_VD, targets_n, metric_only=True)


def naive_bonus(hidden_nD: Tensor, weight_VD: Tensor, targets_n: Tensor) -> Values:
    return full_logits(hidden_nD, weight_VD, targets_n, metric_only=False)


def full_logits(
    hidden_nD: Tensor, weight_VD: Tensor, targets_n: Tensor, *, metric_only: bool
) -> Values:
    logprobs_nV = (hidden_nD @ weight_VD.T).div_(TEMPERATURE).log_softmax(-1)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not metric_only):
        entropy_n = -(logprobs_nV.exp() * logprobs_nV).sum(-1)
    return logprobs_nV.gather(-1, targets_n[:, None]).squeeze(-1), entropy_n


def trl(hidden_nD: Tensor, weight_VD: Tensor, targets_n: Tensor) -> Values:
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as chunk_size

    softcap, scale, outputs = None, 1.0, ("entropy",)
    arguments = (None, targets_n, TEMPERATURE, chunk_size, softcap, scale, outputs)
    return ChunkedLogProbFunction.apply(hidden_nD, weight_VD, *arguments)[:2]


def scorers(case: Case) -> dict[str, Scorer]:
    arms = {"ours": ours, "full logits": naive_bonus if case.entropy_coef else naive}
    if not case.peers:
        return arms
    try:
        import trl as _  # noqa: F401
    except ImportError:
        return arms
    return {**arms, "TRL fused": trl}


def prepare(scorer: Scorer, case: Case) -> Callable[[], list[Tensor]]:
    """Inputs of the case, the same each time; the work returns values and gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden_nD = torch.randn(case.num_tokens, case.width, generator=generator, requires_grad=True)
    weight_VD = torch.empty(case.vocab, case.width)
    weight_VD.normal_(std=2 / case.width**0.5, generator=generator).requires_grad_()
    targets_n = torch.randint(0, case.vocab, (case.num_tokens,), generator=generator)
    upstream_n = torch.randn(case.num_tokens, generator=generator)

    def work() -> list[Tensor]:
        logprobs_n, entropy_n = scorer(hidden_nD, weight_VD, targets_n)
        loss = (logprobs_n * upstream_n).sum()
        if case.entropy_coef:
            loss = loss - case.entropy_coef * entropy_n.sum()
        grads = torch.autograd.grad(loss, (hidden_nD, weight_VD))
        return [logprobs_n.detach(), entropy_n.detach(), *grads]

    return work


def require_equal(works: dict[str, Callable[[], list[Tensor]]]) -> None:
    """Every arm's values and gradients are those of full logits, up to RTOL of the largest."""
    expected = works["full logits"]()
    for name, work in works.items():
        for what, own, other in zip(
            ("log-prob", "entropy", "gradient of hidden", "gradient of weight"),
            work(),
            expected,
            strict=True,
        ):
            difference, largest = float((own - other).abs().max()), float(other.abs().max())
            if not difference <= RTOL * largest:
                raise SystemExit(f"{name}: {what} is off by {difference:.2e} of {largest:.2e}")


def memory(case: Case, scorer: Scorer) -> int:
    """Peak bytes of one fresh process beyond inputs and the gradients that it returns."""
    gradients = FLOAT32 * case.width * (case.vocab + case.num_tokens)
    warm_case = Case(vocab=64, width=case.width, num_tokens=64, entropy_coef=case.entropy_coef)
    return peak_extra_bytes(prepare_warm, scorer, case, warm_case) - gradients


def prepare_warm(scorer: Scorer, case: Case, warm_case: Case) -> Callable[[], list[Tensor]]:
    """As `prepare`, after one small call that loads what a first call loads."""
    prepare(scorer, warm_case)()
    return prepare(scorer, case)


def computed_memory(case: Case, name: str, num_tokens: int) -> int:
    """Peak extra bytes by counting tensors, for any number of tokens.

    Full logits: three [n, V] at a time, at the entropy (log-probs, their exponentials, the product)
    and again in the backward of log-softmax (log-probs, its gradient before and after); five where
    the entropy has a gradient. The returned gradients, which do not count, come after that peak.
    Ours: two tiles, or three.
    """
    logits = FLOAT32 * num_tokens * case.vocab
    if name == "full logits":
        gradients = FLOAT32 * case.width * (case.vocab + num_tokens)
        return logits * (5 if case.entropy_coef else 3) - gradients
    return (3 if case.entropy_coef else 2) * min(FLOAT32 * head.TILE, logits)


def run_case(case: Case, rounds: int) -> dict[str, Any]:
    arms = scorers(case)
    works = {name: prepare(scorer, case) for name, scorer in arms.items()}
    require_equal(works)
    timings = interleaved(works, rounds)
    del works
    # Logits, gradient of hidden, gradient of weight, for an eighth of the vocabulary: long enough.
    n, vocab, width = case.num_tokens, case.vocab, case.width
    part = -(-vocab // 8)
    limit = gemm_flops_per_s([(n, width, part), (n, part, width), (part, n, width)])
    products = {"full logits": 3}
    result: dict[str, Any] = {"case": asdict(case), "gemm_flops_per_cpu_s": limit, "arms": {}}
    for name, scorer in arms.items():
        num_products = products.get(name, 4)
        cpu_s = sorted(timings[name].cpu_s)[rounds // 2]
        result["arms"][name] = {
            "wall_s": timings[name].wall_s,
            "cpu_s": timings[name].cpu_s,
            "cpu_ratio": asdict(ratio(timings[name].cpu_s, timings["full logits"].cpu_s)),
            "wall_ratio": asdict(ratio(timings[name].wall_s, timings["full logits"].wall_s)),
            "share_of_gemm": num_products * 2 * n * vocab * width / limit / cpu_s,
            "extra_bytes": memory(case, scorer),
        }
    return result


def report(result: dict[str, Any], case: Case) -> None:
    limit, rows = result["gemm_flops_per_cpu_s"], []
    plain = result["arms"]["full logits"]
    for name, arm in result["arms"].items():
        cpu = sorted(arm["cpu_s"])
        times, extra = arm["cpu_ratio"], arm["extra_bytes"]
        rows.append(
            [
                name,
                f"{cpu[len(cpu) // 2]:.2f}",
                f"{times['median']:.2f} ({times['low']:.2f}..{times['high']:.2f})",
                f"{sorted(arm['wall_s'])[len(cpu) // 2]:.2f}",
                f"{arm['share_of_gemm']:.0%}",
                f"{extra / MIB:,.0f}",
                f"{plain['extra_bytes'] / max(extra, 1):.1f}x",
            ]
        )
    print(f"\n{case}; products alone reach {limit / 1e9:.0f} GFLOP per CPU second")
    print_table(
        ["", "CPU s", "CPU / full logits", "wall s", "of products", "extra MiB", "less by"], rows
    )
    for name in ("full logits", "ours"):
        small, large = (
            computed_memory(case, name, tokens) / MIB
            for tokens in (case.num_tokens, LARGE_NUM_TOKENS)
        )
        print(
            f"{name}: computed {small:,.0f} MiB at n={case.num_tokens:,}, "
            f"{large:,.0f} MiB at n={LARGE_NUM_TOKENS:,}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_true", help="one shape, three rounds, no peers: within 90 s"
    )
    size.add_argument("--smoke", action="store_true", help="toy shapes: that it runs, not how fast")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine too")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all numbers here as well")
    args = parser.parse_args(arguments)
    if not (args.anyway or args.smoke):
        require_quiet(1.5)
    cases = SMOKE if args.smoke else QUICK if args.quick else FULL
    rounds = 1 if args.smoke else 3
    print("  ".join(f"{name} {value}" for name, value in environment().items()))
    if not args.smoke:
        print(f"copying: {memory_bytes_per_s() / 1e9:.1f} GB per CPU second, read plus written")
    print(
        "'of products': what the arm's matrix products (four for tiles, which compute the logits\n"
        "twice; three for full logits) would take alone, over what it takes. The rest is bound by\n"
        "memory for full logits, whose [n, V] tensors leave every cache, and by exp for tiles.\n"
        "'extra MiB': peak of a fresh process beyond inputs and returned gradients."
    )
    results = []
    for case in cases:
        results.append(run_case(case, rounds))
        report(results[-1], case)
    if args.json:
        document = {"environment": environment(), "results": results}
        args.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
