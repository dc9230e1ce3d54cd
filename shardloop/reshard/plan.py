"""The reshard plan: who sends which box of which tensor to whom. Floor 1.

`plan_reshard(src, dst)` returns data; `reshard.verify` proves it and executors carry it out. A plan
is symbolic: per tensor class one join for each dim, shared by all layers. What a single rank sends
or receives is written out by `Plan.sends` and `Plan.receives` (see `reshard.turns`).

    Layout src ─┐                                   ┌─▶ cost
                ├─ plan_reshard ─▶ Plan ─▶ verify ─▶ Proof ─▶ executors
    Layout dst ─┘
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardloop.errors import PlanError
from shardloop.families.base import CanonicalModel, TensorClass
from shardloop.layout.layout import Layout, LocalTensor
from shardloop.layout.tables import make_table
from shardloop.reshard.flow import Flow, Route, Transfer
from shardloop.reshard.join import Join, join
from shardloop.reshard.turns import transfers_from, transfers_to


@dataclass(frozen=True, kw_only=True)
class Plan(Route):
    """Every transfer from the ranks of one layout to the ranks of another."""

    def sends(self, rank: int) -> list[Transfer]:
        """What global `rank` sends, its copies to itself included; empty if it is no source.

        The transfers of one pair of ranks come in the same order as in `receives` of the other.
        """
        src = self.src_index.get(rank)
        return [] if src is None else transfers_from(self, src)

    def receives(self, rank: int) -> list[Transfer]:
        """What global `rank` receives, its copies from itself included; empty if it is no
        destination. Together they write each element that it holds exactly once."""
        dst = self.dst_index.get(rank)
        return [] if dst is None else transfers_to(self, dst)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan's content: equal plans have equal digests, in any process."""
        digest = hashlib.sha256()
        for layout, ranks in ((self.src, self.src_ranks), (self.dst, self.dst_ranks)):
            digest.update(repr((layout.spec, layout.mesh, ranks)).encode())
        digest.update(_model_text(self).encode())
        for flow in sorted(self.flows, key=lambda flow: (flow.key, flow.dst.template)):
            digest.update(repr((flow.key, flow.src.template, flow.dst.template)).encode())
            for step in flow.joins:
                digest.update(step.digest)
        return digest.hexdigest()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every global rank that takes part, in order."""
        return tuple(sorted({*self.src_ranks, *self.dst_ranks}))

    def summary(self) -> dict[str, Any]:
        """The plan in words that JSON can hold: layouts, ranks, and each class's pairs by dim."""
        return {
            "src": self.src.spec,
            "dst": self.dst.spec,
            "src_ranks": list(self.src_ranks),
            "dst_ranks": list(self.dst_ranks),
            "model": self.src.model.name,
            "num_layers": self.src.model.num_layers,
            "digest": self.digest,
            "flows": [
                {
                    "key": flow.key,
                    "src": flow.src.template,
                    "dst": flow.dst.template,
                    "layers": list(flow.tensor_class.layers),
                    "shape": list(flow.tensor_class.shape),
                    "num_pairs": [len(step.lo) for step in flow.joins[1:]],
                }
                for flow in self.flows
            ],
        }


def plan_reshard(
    src: Layout,
    dst: Layout,
    *,
    src_ranks: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
) -> Plan:
    """Plan the way from one layout of a model to another.

    Args:
        src_ranks: global rank of each rank of `src`; default 0..S-1.
        dst_ranks: global rank of each rank of `dst`; default S..S+D-1. Ranks may be in both: what
            such a rank already holds it copies to itself. Other elements come from their holders
            in turn, so that replicas share the work.
    Raises:
        PlanError: the models differ (all tensor names of either side that the other lacks are
            listed), or the ranks do not fit the layouts.
    """
    default_dst = range(src.world_size, src.world_size + dst.world_size)
    src_ranks = tuple(range(src.world_size) if src_ranks is None else src_ranks)
    dst_ranks = tuple(default_dst if dst_ranks is None else dst_ranks)
    _check_ranks("src_ranks", src_ranks, src)
    _check_ranks("dst_ranks", dst_ranks, dst)
    _check_models(src, dst)
    flows = tuple(
        _flow(src, tensor_class, target)
        for tensor_class in dst.model.classes
        for target in dst.tensors
        if tensor_class.key in target.keys
    )
    return Plan(src=src, dst=dst, src_ranks=src_ranks, dst_ranks=dst_ranks, flows=flows)


def _flow(src: Layout, tensor_class: TensorClass, target: LocalTensor) -> Flow:
    key = tensor_class.key
    source = next(tensor for tensor in src.tensors if key in tensor.keys)
    joins: list[Join] = [
        join(make_table(a, key), make_table(b, key))
        for a, b in zip(source.cuts, target.cuts, strict=True)
    ]
    return Flow(tensor_class=tensor_class, src=source, dst=target, joins=tuple(joins))


def _check_ranks(name: str, ranks: tuple[int, ...], layout: Layout) -> None:
    if len(ranks) != layout.world_size or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise PlanError(
            f"{name}={list(ranks)} does not fit layout {layout.spec}; "
            f"give {layout.world_size} different ranks >= 0"
        )


def _check_models(src: Layout, dst: Layout) -> None:
    if src.model.classes == dst.model.classes and _sizes(src.model) == _sizes(dst.model):
        return
    here, there = src.model.tensor_shapes(), dst.model.tensor_shapes()
    lines = _named("only in the source", [name for name in here if name not in there])
    lines += _named("only in the destination", [name for name in there if name not in here])
    lines += _named(
        "of different shapes",
        [
            f"{name} {shape} -> {there[name]}"
            for name, shape in here.items()
            if there.get(name, shape) != shape
        ],
    )
    sizes = zip(_sizes(src.model).items(), _sizes(dst.model).values(), strict=True)
    lines += _named("different sizes", [f"{key} {a} -> {b}" for (key, a), b in sizes if a != b])
    if lines:
        raise PlanError(
            f"{src.model.name} in layout {src.spec} and {dst.model.name} in layout {dst.spec} are "
            f"not the same model; make both layouts from one config:\n" + "\n".join(lines)
        )


def _sizes(model: CanonicalModel) -> dict[str, int]:
    """What decides the meaning of equal shapes."""
    return {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
    }


def _named(title: str, items: list[str]) -> list[str]:
    return [f"  {title} ({len(items)}):", *(f"    {item}" for item in items)] if items else []


def _model_text(plan: Plan) -> str:
    classes = sorted(plan.src.model.classes, key=lambda c: c.key)
    return repr([(c.key, c.template, c.domain) for c in classes])
