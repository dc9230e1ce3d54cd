"""Deltas: bytes per changed element, time beside copying the weights, predicted density.

Called by `benchmarks.reshard`. Two versions of bfloat16 weights follow one float32 master (normal,
sigma 0.02) by a step of equal size and random signs, sized for the wanted density. Each round sends
from one version to the other and back, a bucket at a time, as `transport.delta` does: the receiver
digests what it holds, the sender compares, encodes and keeps a copy, the receiver applies. In one
process and on one thread, so all of it adds up.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.goals import Goal, as_json, show
from benchmarks.measure import MIB, Timings, interleaved, print_table, ratio
from shardloop.delta.codec import HEADER_BYTES, Delta, apply
from shardloop.delta.density import predicted_density
from shardloop.delta.digest import digest
from shardloop.delta.source import DeltaSource
from shardloop.transport.base import BUCKET_BYTES

SIGMA = 0.02
DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    weight_bytes: int
    densities: Sequence[float]
    rounds: int


SMOKE = Size(weight_bytes=2**16, densities=[0.015, 0.8], rounds=1)
QUICK = Size(weight_bytes=32 * MIB, densities=[0.001, 0.015, 0.05, 0.2, 0.5], rounds=5)
FULL = Size(
    weight_bytes=128 * MIB, densities=[0.0, 0.001, 0.005, 0.015, 0.05, 0.1, 0.2, 0.5, 0.8], rounds=7
)


class Pair:
    """A sender and a receiver of weights that go to and fro between two versions."""

    def __init__(self, versions: tuple[Tensor, Tensor]) -> None:
        size = BUCKET_BYTES // DTYPE.itemsize
        self._versions = [version.split(size) for version in versions]
        self.held = versions[0].clone()
        self._held = self.held.split(size)
        self._sources = [DeltaSource() for _ in self._held]
        self._holds: list[int] = []
        self.deltas: list[Delta] = []
        self._turn = 0
        self.send()
        self.receive()

    def claim(self) -> None:
        """The receiver's digests."""
        self._holds = [digest(bucket) for bucket in self._held]

    def send(self) -> None:
        """The next version, from what the receiver holds."""
        if not self._holds:
            self.claim()
        buckets = self._versions[self._turn % 2]
        self._turn += 1
        self.deltas = [
            source.update(new, holds=holds)
            for source, new, holds in zip(self._sources, buckets, self._holds, strict=True)
        ]

    def receive(self) -> None:
        for delta, held, holds in zip(self.deltas, self._held, self._holds, strict=True):
            apply(delta, held, holds=holds)


def make_versions(num_elements: int, density: float) -> tuple[tuple[Tensor, Tensor], float, float]:
    """Two versions, the predicted density and its standard deviation."""
    generator = torch.Generator().manual_seed(0)
    master = torch.empty(num_elements).normal_(std=SIGMA, generator=generator)
    signs = torch.randint(0, 2, (num_elements,), generator=generator).mul_(2).sub_(1)
    low, high = 0.0, 1.0  # the density grows with the step
    sample, sample_signs = master[: 2**16], signs[: 2**16]
    for _ in range(60):
        middle = (low * high) ** 0.5 if low else high / 4
        found = predicted_density(sample, middle * sample_signs, dtype=DTYPE).mean
        low, high = (middle, high) if found < density else (low, middle)
        if low and high / low < 1.0001:
            break
    step = (high if density else 0.0) * signs
    predicted = predicted_density(master, step, dtype=DTYPE)
    return (master.to(DTYPE), (master + step).to(DTYPE)), predicted.mean, predicted.std


def run(size: Size) -> dict[str, Any]:
    rows = [_row(size, density) for density in size.densities]
    return {"weight_bytes": size.weight_bytes, "rows": rows, "goals": as_json(_goals(rows))}


def _row(size: Size, wanted: float) -> dict[str, Any]:
    versions, predicted, std = make_versions(size.weight_bytes // DTYPE.itemsize, wanted)
    pair = Pair(versions)
    target = torch.empty_like(versions[0])
    num_changed = int((versions[0].view(torch.int16) != versions[1].view(torch.int16)).sum())
    for version in (versions[1], versions[0]):
        pair.claim()
        pair.send()
        pair.receive()
        if not torch.equal(pair.held.view(torch.int16), version.view(torch.int16)):
            raise SystemExit(f"at density {wanted} the applied delta is not the new version")
    timings = _timings(pair, versions, target, size.rounds)
    copied = timings["copy"]
    encode_apply = [
        sum(parts)
        for parts in zip(*(timings[part].cpu_s for part in ("send", "receive")), strict=True)
    ]
    with_claims = [a + b for a, b in zip(encode_apply, timings["claim"].cpu_s, strict=True)]
    num_bytes = sum(delta.num_bytes for delta in pair.deltas)
    return {
        "density": num_changed / len(versions[0]),
        "predicted": predicted,
        "predicted_std": std,
        "num_changed": num_changed,
        "num_bytes": num_bytes,
        "header_bytes": HEADER_BYTES * len(pair.deltas),
        "bytes_per_changed": num_bytes / num_changed if num_changed else None,
        "times_fewer_bytes": size.weight_bytes / num_bytes,
        "num_dense": sum(delta.symbols is None for delta in pair.deltas),
        "num_buckets": len(pair.deltas),
        "to_copy": {
            part: asdict(ratio(timings[part].cpu_s, copied.cpu_s))
            for part in ("claim", "send", "receive")
        }
        | {
            "send + receive": asdict(ratio(encode_apply, copied.cpu_s)),
            "all": asdict(ratio(with_claims, copied.cpu_s)),
        },
        "timings": {name: asdict(timing) for name, timing in timings.items()},
    }


def _timings(
    pair: Pair, versions: tuple[Tensor, Tensor], target: Tensor, rounds: int
) -> dict[str, Timings]:
    """The three parts of an update in their order, then a copy of all weights, in each round."""
    arms = {
        "claim": pair.claim,
        "send": pair.send,
        "receive": pair.receive,
        "copy": lambda: target.copy_(versions[0]),
    }
    return interleaved(arms, rounds, rotate=False)


def _goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    goals = []
    for row in rows:
        where = f"density {row['density']:.2%}"
        if row["density"] >= 0.01 and not row["num_dense"]:
            goals.append(
                Goal(what=f"{where}: bytes per changed element",
                     value=row["bytes_per_changed"], limit=3.2)
            )  # fmt: skip
        if 0 < row["density"] <= 0.016:
            value = row["times_fewer_bytes"]
            goals.append(
                Goal(what=f"{where}: times fewer bytes", value=value, limit=40, at_least=True)
            )
        if row["density"] <= 0.051:
            value = row["to_copy"]["send + receive"]["median"]
            goals.append(Goal(what=f"{where}: encode + apply / copy", value=value, limit=1.0))
        off = abs(row["density"] - row["predicted"]) / max(row["predicted_std"], 1e-12)
        if row["num_changed"]:
            goals.append(
                Goal(what=f"{where}: standard deviations from the prediction", value=off, limit=4)
            )
    return goals


HEADERS = [
    "density", "predicted", "bytes/changed", "times fewer bytes", "dense buckets", "digest/copy",
    "encode/copy", "apply/copy", "all/copy",
]  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    per, to_copy = row["bytes_per_changed"], row["to_copy"]
    return [
        f"{row['density']:.3%}",
        f"{row['predicted']:.3%} +- {row['predicted_std']:.3%}",
        "" if per is None else f"{per:.2f}",
        f"{row['times_fewer_bytes']:.1f}",
        f"{row['num_dense']} of {row['num_buckets']}",
        *(f"{to_copy[part]['median']:.2f}" for part in ("claim", "send", "receive", "all")),
    ]


def report(results: dict[str, Any]) -> None:
    copies = [statistics.median(row["timings"]["copy"]["cpu_s"]) for row in results["rows"]]
    rate = results["weight_bytes"] / statistics.median(copies) / 1e9
    print(
        f"{results['weight_bytes'] / 1e6:.0f} MB of bfloat16; a copy runs at {rate:.1f} GB per "
        "CPU second; times are CPU seconds over the copy's"
    )
    print_table(HEADERS, [cells(row) for row in results["rows"]])
    show(results["goals"])
