"""The reshard plan: who sends which box of which tensor to whom. Floor 1.

`plan_reshard(src, dst)` returns data; `reshard.verify` proves it and executors carry it out. A plan
is symbolic: per tensor class one join for each block of dims, shared by all layers, experts and
equal classes. What a single rank sends or receives comes as arrays from `Plan.runs_from` and
`Plan.runs_to`, and written out from `Plan.sends` and `Plan.receives`.

    Layout src ─┐                                   ┌─▶ cost
                ├─ plan_reshard ─▶ Plan ─▶ verify ─▶ Proof ─▶ executors
    Layout dst ─┘
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardloop.families.base import TensorClass
from shardloop.layout.layout import Layout, LocalTensor
from shardloop.layout.strips import Ints
from shardloop.layout.tables import Cut, Table, make_table
from shardloop.reshard.agree import check_models, check_ranks
from shardloop.reshard.cross import cross, of_copies
from shardloop.reshard.flow import Blocks, Flow, Route, Runs, Transfer
from shardloop.reshard.join import join
from shardloop.reshard.lost import check_living
from shardloop.reshard.runs import runs_from, runs_to
from shardloop.reshard.transfers import written_out

LAYER = 0
"""The canonical dim in which the copies of a tied tensor may differ."""


@dataclass(frozen=True, kw_only=True)
class Plan(Route):
    """Every transfer from the ranks of one layout to the ranks of another."""

    def sends(self, rank: int) -> list[Transfer]:
        """What global `rank` sends, its copies to itself included; empty if it is no source.

        The transfers of one pair of ranks come in the same order as in `receives` of the other.
        """
        return written_out(self, self.runs_from(rank))

    def receives(self, rank: int) -> list[Transfer]:
        """What global `rank` receives, its copies from itself included; empty if it is no
        destination. Together they write each element that it holds exactly once."""
        return written_out(self, self.runs_to(rank))

    def runs_from(self, rank: int) -> Iterator[Runs]:
        """What `sends` writes out, as arrays: boxes of each flow for ranges of layers."""
        src = self.src_index.get(rank)
        return iter(()) if src is None else runs_from(self, src)

    def runs_to(self, rank: int) -> Iterator[Runs]:
        """What `receives` writes out."""
        dst = self.dst_index.get(rank)
        return iter(()) if dst is None else runs_to(self, dst)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan's content: equal plans have equal digests, in any process."""
        digest = hashlib.sha256()
        for layout, ranks in ((self.src, self.src_ranks), (self.dst, self.dst_ranks)):
            digest.update(repr((layout.spec, layout.mesh, ranks)).encode())
        classes = sorted(self.src.model.classes, key=lambda c: c.key)
        digest.update(repr((self.lost, classes)).encode())
        for flow in sorted(self.flows, key=lambda flow: (flow.key, flow.dst.template)):
            tensors = [_text(tensor) for tensor in (*flow.src, flow.dst)]
            digest.update(repr((flow.key, tensors, flow.blocks)).encode())
            for step in flow.joins:
                digest.update(step.digest)
        return digest.hexdigest()

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every global rank that takes part, in order."""
        return tuple(sorted({*self.src_ranks, *self.dst_ranks}))

    def summary(self) -> dict[str, Any]:
        """The plan in words that JSON can hold: layouts, ranks, and each class's pairs by block."""
        return {
            "src": self.src.spec,
            "dst": self.dst.spec,
            "src_ranks": list(self.src_ranks),
            "dst_ranks": list(self.dst_ranks),
            "lost": list(self.lost),
            "model": self.src.model.name,
            "num_layers": self.src.model.num_layers,
            "digest": self.digest,
            "flows": [
                {
                    "key": flow.key,
                    "src": [tensor.template for tensor in flow.src],
                    "dst": flow.dst.template,
                    "layers": list(flow.tensor_class.layers),
                    "experts": list(flow.tensor_class.experts),
                    "shape": list(flow.tensor_class.shape),
                    "dtype": flow.tensor_class.dtype,
                    "blocks": [list(block) for block in flow.blocks],
                    "num_pairs": [len(step.lo) for step in flow.joins],
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
    lost: Sequence[int] = (),
) -> Plan:
    """Plan the way from one layout of a model to another.

    Args:
        src_ranks: global rank of each rank of `src`; default 0..S-1.
        dst_ranks: global rank of each rank of `dst`; default S..S+D-1. Ranks may be in both: what
            such a rank already holds it copies to itself. Other elements come from their holders
            in turn, so that replicas share the work.
        lost: global ranks of `src` that hold nothing any more; the other holders take their turns.
    Raises:
        PlanError: the models differ (what either side has and the other lacks is named), the ranks
            do not fit the layouts, or some elements are held by lost ranks alone.
    """
    default_dst = range(src.world_size, src.world_size + dst.world_size)
    src_ranks = tuple(range(src.world_size) if src_ranks is None else src_ranks)
    dst_ranks = tuple(default_dst if dst_ranks is None else dst_ranks)
    check_ranks(src, src_ranks, dst, dst_ranks, tuple(lost))
    check_models(src, dst)
    sources = {
        key: [tensor for tensor in src.tensors if key in tensor.keys] for key in src.model.class_of
    }
    flows = tuple(
        _flow(sources[tensor_class.key], tensor_class, target)
        for tensor_class in dst.model.classes
        for target in dst.tensors
        if tensor_class.key in target.keys
    )
    plan = Plan(
        src=src,
        dst=dst,
        src_ranks=src_ranks,
        dst_ranks=dst_ranks,
        lost=tuple(sorted(set(lost))),
        flows=flows,
    )
    check_living(plan)
    return plan


def _text(tensor: LocalTensor) -> str:
    """All that it is but for its strips, which the tables of its joins hold."""
    axes = [(cut.dims, cut.axes) for cut in tensor.cuts]
    return repr((tensor.template, tensor.mesh, axes, tensor.stacked, tensor.local_numbers))


def _flow(sources: list[LocalTensor], tensor_class: TensorClass, target: LocalTensor) -> Flow:
    key = tensor_class.key
    blocks = _blocks(len(tensor_class.domain), [*sources[0].cuts, *target.cuts])
    copies = [tensor for tensor in sources if _is_copy(tensor, sources[0], key)]
    joins = []
    for block in blocks:
        shown = copies if LAYER in block else copies[:1]  # elsewhere they are alike
        table = of_copies(tuple(_table(tensor, block, key) for tensor in shown))
        joins.append(join(table, _table(target, block, key)))
    return Flow(
        tensor_class=tensor_class, src=tuple(copies), dst=target, blocks=blocks, joins=tuple(joins)
    )


def _blocks(num_dims: int, cuts: list[Cut]) -> Blocks:
    """The finest partition of the dims that all cuts respect."""
    joined = {dim for cut in cuts for dim in cut.dims[1:]}  # with the dim before
    blocks: list[tuple[int, ...]] = []
    for dim in range(num_dims):
        if dim in joined:
            blocks[-1] += (dim,)
        else:
            blocks.append((dim,))
    return tuple(blocks)


def _is_copy(tensor: LocalTensor, first: LocalTensor, key: str) -> bool:
    """Do both lie alike on the ranks but for the layer? Then a tied tensor may come from either.

    They may have different padding, and strips of their own.
    """
    here, there = ([(cut.dims, cut.axes) for cut in t.cuts] for t in (tensor, first))
    return (tensor.mesh, here) == (first.mesh, there) and all(
        np.array_equal(x, y)
        for a, b in zip(tensor.cuts[1:], first.cuts[1:], strict=True)
        for x, y in zip(_columns(make_table(a, key)), _columns(make_table(b, key)), strict=True)
    )


def _columns(table: Table) -> tuple[Ints, ...]:
    return table.part, table.lo, table.hi, table.loc


def _table(tensor: LocalTensor, block: tuple[int, ...], key: str) -> Table:
    return cross(tuple(make_table(cut, key) for cut in tensor.cuts if cut.dims[0] in block))
