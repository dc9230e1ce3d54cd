"""Writes docs/conventions.md from `shardloop.rl.conventions`. Run by `make docs`.

    python scripts/write_conventions.py            write the page
    python scripts/write_conventions.py --check    exit 1 where the page is stale

Every number is computed by the library's own functions; this file only lays them out.
"""

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from shardloop.rl import conventions as example
from shardloop.rl.conventions import Convention, conventions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "conventions.md"
SAMPLES = "abcd"

INTRO = """\
# Conventions

<!-- Written by `make docs` from shardloop/rl/conventions.py; change the functions there. -->

Papers and libraries give one name to different formulas. This page puts every choice that a run's
settings can make on one worked example, with its value and its gradient, computed by the functions
that train. Names are the fields of `GRPOConfig` (`--grpo.std none` on the command line).

## The example

Two prompts with two samples each, of different lengths. A token has three probabilities: of the
engine that sampled it, of the trainer before the update (`old`), and of the policy that is being
trained (`new`); its ratio is r = new / old. All formulas below mean their logarithms.

{samples}
In numbers per token, each line is one sample and its tokens stand in order.
"""

TOPICS = {
    "advantage": (
        "Advantages",
        "What the rewards of a group become, one number for each sample. Constants: no gradient. A "
        "group of equal rewards is exactly 0 under every one of them.",
    ),
    "loss": (
        "Policy losses",
        "The loss of each token, and its derivative with respect to that token's `new`. Samples a "
        "and c have A = +1, b and d A = −1; "
        f"clip_low = {example.CLIP_LOW} and clip_high = {example.CLIP_HIGH}. `sg` stops the "
        "gradient. A gradient of 0 means that the clip has cut the token off. The value of cispo "
        "means nothing by itself; only its gradient does.",
    ),
    "aggregation": (
        "Aggregation",
        f"How the losses of tokens (here of ppo with dual_clip={example.DUAL_CLIP:g}, above) "
        "become one number. Counts are those of the whole batch, so no division into ranks and "
        "micro-batches changes the loss. Rows and prompts without loss tokens are not counted. "
        f"aggregation_constant = {example.CONSTANT}.",
    ),
    "kl": (
        "KL to the reference",
        f"Exact expectations over a policy of three tokens with logits {example.LOGITS_V} and a "
        f"reference with logits {example.REF_LOGITS_V}; gradients are with respect to the policy's "
        "logits. The true gradient is the one of k1 in the reward and of k2 in the loss. In the "
        "loss, k1 has none, and k3 has that of KL(reference ‖ policy). In the reward, k2 and k3 "
        "push away from the reference.",
    ),
    "correction": (
        "Correction for the engine",
        "The weight of each token's loss for having been sampled by another program. Constants: no "
        f"gradient. Cap {example.CAP:g}, and for masking the floor {example.FLOOR:g}. Neither mode "
        "changes a denominator, so tokens within the bounds keep their weight.",
    ),
    "overlong": (
        "Overlong completions",
        f"What is added to each sample's reward, with at most {example.MAX_TOKENS} tokens.",
    ),
}
"""Topic -> its heading and what is to be known for reading its table."""


def number(value: float) -> str:
    """Four decimals at most, with a true minus sign and no negative zero."""
    text = f"{value:.4f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "0") else text.replace("-", "−")


def by_sample(values: Sequence[float]) -> str:
    """One line for each sample: its one number, or those of its tokens."""
    counts = example.LENGTHS_B if len(values) == sum(example.LENGTHS_B) else [1] * len(SAMPLES)
    lines, start = [], 0
    for sample, count in zip(SAMPLES, counts, strict=True):
        lines.append(f"{sample}: {', '.join(map(number, values[start : start + count]))}")
        start += count
    return "<br>".join(lines)


def cell(values: Sequence[float] | None) -> str:
    if values is None:
        return "—"
    if len(values) in (len(SAMPLES), sum(example.LENGTHS_B)):
        return by_sample(values)
    return ", ".join(map(number, values))


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def samples_table() -> str:
    rewards = [reward for group in example.REWARDS_PG for reward in group]
    group_size = len(example.REWARDS_PG[0])
    rows, start = [], 0
    for place, (sample, length) in enumerate(zip(SAMPLES, example.LENGTHS_B, strict=True)):
        tokens = slice(start, start + length)
        old, new = example.OLD_n[tokens], example.NEW_n[tokens]
        ratios = [after / before for after, before in zip(new, old, strict=True)]
        columns = (example.ENGINE_n[tokens], old, new, ratios)
        rows.append(
            [
                sample,
                str(1 + place // group_size),
                number(rewards[place]),
                str(length),
                *(", ".join(map(number, column)) for column in columns),
            ]
        )
        start += length
    return table(["sample", "prompt", "reward", "tokens", "engine", "old", "new", "r"], rows)


def topic_table(topic: str, entries: Sequence[Convention]) -> str:
    has_gradient = any(entry.gradient is not None for entry in entries)
    header = ["setting", "formula", "value"] + ["gradient"] * has_gradient
    rows = [
        [
            "<br>".join(f"`{part}`" for part in entry.name.split(", ")),
            entry.formula,
            cell(entry.value),
            *[cell(entry.gradient)] * has_gradient,
        ]
        for entry in entries
    ]
    return table(header, rows)


def page() -> str:
    text = INTRO.format(samples=samples_table())
    for topic, (heading, about) in TOPICS.items():
        entries = [entry for entry in conventions() if entry.topic == topic]
        about = textwrap.fill(about, 100, break_long_words=False, break_on_hyphens=False)
        text += f"\n## {heading}\n\n{about}\n\n{topic_table(topic, entries)}"
    return text


def main(arguments: Sequence[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(f"{arguments}: choose --check or nothing", file=sys.stderr)
        return 2
    if arguments == ["--check"]:
        is_fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        if not is_fresh:
            print(f"{PAGE.name} is not what the code says; run `make docs`", file=sys.stderr)
        return 0 if is_fresh else 1
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(Path.cwd())}" if PAGE.is_relative_to(Path.cwd()) else PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
