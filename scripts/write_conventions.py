"""Writes docs/conventions.md from `shardloop.rl.conventions`. Run by `make docs`.

    python scripts/write_conventions.py            write the page
    python scripts/write_conventions.py --check    exit 1 where the page is stale

Every number is computed by the library's own functions; this file only lays them out.
"""

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from shardloop.config import GRPOConfig
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

## How they fit together

    reward + overlong penalty (− kl_coef × KL)  ──group──▶  A: one advantage for each sample
    A, new, old                                 ────────▶  policy loss of each token
    old, engine                                 ────────▶  correction weight of each token

    loss = Σ over tokens of  scale × (weight × policy loss + kl_coef × KL − entropy_coef × entropy)

The aggregation gives the scale. The KL stands in one of the two places, by `kl_in`. In the first
update on a batch new = old: every ratio is exactly 1, nothing is clipped, and all policy losses
have the same gradient, −A on each token. They differ only with `inner_epochs` above 1, from the
second update on.

## What papers call these

| name | settings | besides |
| --- | --- | --- |
{recipes}
Everything else is at its default. KL coefficients, buffers, rounds and epochs are examples: papers
choose them by their task, as they do learning rates and sizes.

## The example

Two prompts with two samples each, of different lengths. A token has three probabilities: of the
engine that sampled it, of the trainer before the update (old), and of the policy that is being
trained (new). In the formulas `engine`, `old`, `new` and `ref` are their logarithms, and a token's
ratio is r = exp(new − old).

{samples}
In numbers per token, each line is one sample and its tokens stand in order.
"""

RECIPES: dict[str, tuple[dict[str, object], str]] = {
    "GRPO": (
        {"aggregation": "sequence-mean", "kl_coef": 0.04},
        "the KL is k3 in the loss",
    ),
    "Dr. GRPO": (
        {"std": "none", "aggregation": "sequence-sum"},
        "neither the std nor a sample's own length divides",
    ),
    "DAPO": (
        {
            "clip_high": 0.28,
            "overlong": "penalty",
            "overlong_buffer": 4096,
            "resample_rounds": 10,
        },
        "token-mean, no KL; the paper has no limit of rounds and sorts out groups by correctness "
        "alone, here the length penalty counts as well",
    ),
    "RLOO": (
        {
            "advantage": "rloo",
            "aggregation": "sequence-sum",
            "aggregation_constant": 1,
            "kl_coef": 0.03,
            "kl_in": "reward",
        },
        "the true gradient of the mean reward less the KL",
    ),
    "REINFORCE++ with baseline": (
        {"advantage": "reinforce++", "kl_coef": 0.001, "kl_estimator": "k2"},
        "the variant without groups is not here",
    ),
    "GSPO": (
        {
            "loss": "gspo",
            "aggregation": "sequence-mean",
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "inner_epochs": 4,
        },
        "the paper splits a batch into four updates, here each is on the whole batch",
    ),
    "CISPO": (
        {"loss": "cispo", "clip_low": 1.0, "inner_epochs": 2},
        "the lower side is open; the paper tunes the upper one",
    ),
}
"""Name of a paper's method -> the settings that are not default ones, and what else to know."""


def number(value: float) -> str:
    """Four decimals at most, with a true minus sign and no negative zero."""
    text = f"{value:.4f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "0") else text.replace("-", "−")


_LOGITS, _REF_LOGITS = (
    f"({', '.join(map(number, logits))})" for logits in (example.LOGITS_V, example.REF_LOGITS_V)
)

TOPICS = {
    "advantage": (
        "Advantages",
        "What the rewards of a group become, one number for each sample. Constants: no gradient. A "
        "group of equal rewards is exactly 0 under every one of them. To every std 1e-6 is added. "
        "With leave-one-out (rloo) the expected gradient is the true one of the mean reward; with "
        "the group's own mean and no std it is (G − 1) / G of that; a std makes the lead of a "
        "sample count the same in groups of small and of large differences. With groups of two, as "
        "here, the std leaves only who won.",
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
        f"aggregation_constant = {example.CONSTANT}. Only sequence-sum leaves the direction of the "
        "expected policy gradient as it is: where a sample's own length divides its loss "
        "(sequence-mean), its tokens count less the longer it is, and the other two divide by "
        "lengths of the batch.",
    ),
    "kl": (
        "KL to the reference",
        f"Exact expectations over a policy of one token out of three, with logits {_LOGITS} and a "
        f"reference with logits {_REF_LOGITS}; gradients are with respect to the policy's logits. "
        "The true gradient is the one of k1 in the reward and of k2 in the loss. In the loss, k1 "
        "has none, and k3 has that of KL(reference ‖ policy). In the reward, k2 and k3 push away "
        "from the reference. For sequences the two places differ: in the loss each token answers "
        "for the KL at its own place, with what stands before it held fixed (the entropy bonus "
        "does the same); in the reward, where the sum over its tokens is taken off each sample, a "
        "token answers also for the KL of all that comes after it, which is the true gradient of "
        "the sequences' KL. It is taken off before the group is compared, so a std divides it too.",
    ),
    "correction": (
        "Correction for the engine",
        "The weight of each token's loss for having been sampled by another program. Constants: no "
        f"gradient. Cap {example.CAP:g}, and for masking the floor {example.FLOOR:g}. Neither mode "
        "changes a denominator, so tokens within the bounds keep their weight. The product over "
        "the row, with a cap that cuts nothing, makes the expected gradient the exact one; the "
        "others are biased and vary less.",
    ),
    "overlong": (
        "Overlong completions",
        f"What is added to each sample's reward, with at most {example.MAX_TOKENS} tokens. "
        "`overlong=mask` adds nothing: what was cut off stays out of the loss, and its reward "
        "still counts in its group.",
    ),
}
"""Topic -> its heading and what is to be known for reading its table."""


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


def recipes_table() -> str:
    """
    Raises:
        UsageError: settings that no run takes.
    """
    rows = []
    for name, (settings, remark) in RECIPES.items():
        GRPOConfig(**settings)  # type: ignore[arg-type]
        chosen = "<br>".join(f"`{field}={value}`" for field, value in settings.items())
        rows.append(f"| {name} | {chosen} | {remark} |\n")
    return "".join(rows)


def page() -> str:
    text = INTRO.format(samples=samples_table(), recipes=recipes_table())
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
