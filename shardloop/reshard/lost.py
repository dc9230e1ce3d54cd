"""Ranks that are lost: is everything still held by another? Called by `plan_reshard`. Floor 1."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from shardloop.errors import PlanError
from shardloop.layout.strips import Ints
from shardloop.reshard.flow import Flow, Route
from shardloop.reshard.sides import NOBODY
from shardloop.reshard.turns import opened


def check_living(route: Route) -> None:
    """
    Raises:
        PlanError: some elements were held by lost ranks alone; it names tensors, layers and ranks.
    """
    if not route.lost:
        return
    gone: dict[str, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
    for flow in route.flows:
        layers, ranks = _dead(flow, route.lost_index)
        gone[flow.tensor_class.template][0].update(layers)
        gone[flow.tensor_class.template][1].update(route.src_ranks[rank] for rank in ranks)
    lines = [
        f"  {template}, layers {_ranges(layers)}: only on ranks {_ranges(ranks)}"
        for template, (layers, ranks) in sorted(gone.items())
        if layers
    ]
    if lines:
        raise PlanError(
            f"with ranks {_ranges(route.lost)} lost, no rank holds all of these tensors; "
            "load them from a checkpoint:\n" + "\n".join(lines)
        )


def _dead(flow: Flow, lost: Ints) -> tuple[set[int], set[int]]:
    """Layers of which all holders of something are lost, and the ranks that held it."""
    atoms = [
        np.unique(step.holders.group[np.isin(step.holders.part, part)])
        for step, part in zip(flow.joins, flow.holders.parts(lost), strict=True)
    ]
    held = flow.holders.number(opened(atoms), lost) != NOBODY
    held &= held.sum(axis=-1, keepdims=True) == flow.holders.count(opened(atoms))
    by_layers = atoms[0][held.any(axis=tuple(range(1, held.ndim)))]
    runs = zip(
        flow.joins[0].atom_lo[by_layers, 0].tolist(),
        flow.joins[0].atom_hi[by_layers, 0].tolist(),
        strict=True,
    )
    ranks = lost[held.any(axis=tuple(range(held.ndim - 1)))]
    return {layer for lo, hi in runs for layer in range(lo, hi)}, set(ranks.tolist())


def _ranges(numbers: Iterable[int]) -> str:
    """`0-3, 7`"""
    ends: list[list[int]] = []
    for number in sorted(numbers):
        if ends and number == ends[-1][1] + 1:
            ends[-1][1] = number
        else:
            ends.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)
