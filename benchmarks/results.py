"""Writes benchmarks/results.md from the JSON of benchmarks; sections of others stay as they are.

python -m benchmarks.results rollout.json grpo.json parity.json
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import reshard_checkpoint, reshard_delta, reshard_planning, reshard_transfer

TARGET = Path(__file__).with_name("results.md")


def arms_table(arms: dict[str, Any]) -> Iterator[str]:
    yield "| arm | tokens/s | CPU s | arm/ours, wall | arm/ours, CPU |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name, arm in arms.items():
        ratios = [
            f"{r['median']:.2f} ({r['low']:.2f}..{r['high']:.2f})"
            for r in (arm["wall_ratio"], arm["cpu_ratio"])
        ]
        yield f"| {name} | {arm['tokens_per_s']:.0f} | {arm['cpu_s']:.2f} | {' | '.join(ratios)} |"
    yield ""


def rollout_lines(results: dict[str, Any]) -> Iterator[str]:
    load = results["size"]["load"]
    yield (
        f"{load['prompts']} prompts of {load['prompt_tokens']} tokens x {load['samples']}, "
        f"lognormal lengths of median {load['median']}, at most {load['cap']}."
    )
    yield ""
    yield from arms_table(results["arms"])
    yield f"{results['verdict']}."


def grpo_lines(results: dict[str, Any]) -> Iterator[str]:
    if "train" in results:
        train = results["train"]
        yield f"Train step on {train['tokens']} tokens, {train['scored_tokens']} of them scored:"
        yield ""
        yield from arms_table(train["arms"])
        yield f"Products alone would take {train['limit']['share']:.0%} of our CPU seconds."
        yield ""
    if "whole" in results:
        yield "Whole step, by completion token:"
        yield ""
        yield from arms_table(results["whole"]["arms"])


def parity_lines(results: dict[str, Any]) -> Iterator[str]:
    size = results["size"]
    yield (
        f"{size['seeds']} seeds, {size['steps']} steps of {results['samples_per_step']} samples: "
        f"{results['verdict']['text']}."
    )


def head_lines(results: dict[str, Any]) -> Iterator[str]:
    for result in results["results"]:
        case = ", ".join(f"{name} {value}" for name, value in result["case"].items())
        yield f"{case}:"
        yield ""
        yield "| arm | CPU / full logits | of products | extra MiB |"
        yield "| --- | ---: | ---: | ---: |"
        for name, arm in result["arms"].items():
            cpu = arm["cpu_ratio"]
            yield (
                f"| {name} | {cpu['median']:.2f} ({cpu['low']:.2f}..{cpu['high']:.2f}) | "
                f"{arm['share_of_gemm']:.0%} | {arm['extra_bytes'] / 2**20:,.0f} |"
            )
        yield ""


def plain_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headers)} |"
    yield f"| --- |{' ---: |' * (len(headers) - 1)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def bullets(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"- {line}" for line in lines)
    yield ""


def reshard_lines(results: dict[str, Any]) -> Iterator[str]:
    if planning := results.get("planning"):
        part = reshard_planning
        yield from plain_table(part.HEADERS, [part.cells(row) for row in planning["rows"]])
        yield from bullets(part.sentences(planning))
    for row in results.get("transfer", {}).get("cases", ()):
        part = reshard_transfer
        yield from (f"{part.title(row)}:", "")
        yield from plain_table(part.HEADERS, [part.cells(*arm) for arm in row["arms"].items()])
    if delta := results.get("delta"):
        part = reshard_delta
        yield from (f"Deltas of {delta['weight_bytes'] / 1e6:.0f} MB of bfloat16:", "")
        yield from plain_table(part.HEADERS, [part.cells(row) for row in delta["rows"]])
    for row in results.get("checkpoint", {}).get("rows", ()):
        part = reshard_checkpoint
        yield from (f"{part.title(row)}:", "")
        yield from plain_table(part.HEADERS, [part.cells(*item) for item in part.arms(row)])
        yield from bullets(part.sentences(row))
    goals = [goal["text"] for part in results.values() for goal in goals_of(part)]
    yield from ("Goals:", "", *bullets(goals))


def goals_of(part: Any) -> Sequence[dict[str, Any]]:
    return part.get("goals", ()) if isinstance(part, dict) else ()


SECTIONS = {
    "head": head_lines,
    "rollout": rollout_lines,
    "grpo": grpo_lines,
    "parity": parity_lines,
    "reshard": reshard_lines,
}


def write(paths: Sequence[Path], target: Path) -> None:
    """Raises KeyError for the JSON of a benchmark that has no section here."""
    before = target.read_text(encoding="utf-8") if target.is_file() else ""
    texts = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", before, re.MULTILINE | re.DOTALL))
    for path in paths:
        results = json.loads(path.read_text(encoding="utf-8"))
        found = ", ".join(f"{name} {value}" for name, value in results["environment"].items())
        name = results.get("benchmark", "head")
        texts[name] = "\n".join([f"On {found}.", "", *SECTIONS[name](results)])
    parts = ["# Results", "Written by `python -m benchmarks.results`; not to be edited."]
    for name in SECTIONS:
        if name in texts:
            parts += [f"## {name}", texts[name].strip("\n")]
    target.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.results", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="written by --json")
    parser.add_argument("--to", type=Path, default=TARGET)
    args = parser.parse_args(argv)
    write(args.files, args.to)


if __name__ == "__main__":
    main()
