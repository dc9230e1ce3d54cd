"""One corpus of random plans, each put to all laws at once: any family, any two schemes, any ranks.

Tensors are filled with labels, each element its own number. What ranks must hold is cut from the
whole tensors by plain indexing, without the library's algebra.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, note, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from shardloop.families import CanonicalModel
from shardloop.families.base import ITEMSIZE
from shardloop.layout import Layout, make_layout
from shardloop.layout.tables import _make_table
from shardloop.reshard.copies import find_copies
from shardloop.reshard.cost import cost
from shardloop.reshard.cross import cross, of_copies
from shardloop.reshard.fingerprint import check_fingerprints, local_fingerprints
from shardloop.reshard.inprocess import execute_inprocess
from shardloop.reshard.join import join
from shardloop.reshard.plan import Plan, plan_reshard
from shardloop.reshard.verify import verify
from shardloop.transport.buckets import make_share
from tests.conftest import SEED
from tests.layout.reference import Arrays, any_models, any_specs, expected_local, labels
from tests.reshard.simulate import assert_same, carried, empty_tensors
from tests.reshard.test_laws import by_pair

MOST_RANKS = 48
ITEM = 2
Local = dict[int, Arrays]


@dataclass(frozen=True)
class Case:
    """A model, two layouts of it and the global ranks of each."""

    model: CanonicalModel
    src: str
    dst: str
    src_ranks: tuple[int, ...]
    dst_ranks: tuple[int, ...]
    shuffle: int
    """Seed of the order in which the model's classes are given."""

    def plan(self, model: CanonicalModel | None = None) -> Plan:
        src, dst = (make_layout(model or self.model, spec) for spec in (self.src, self.dst))
        return plan_reshard(src, dst, src_ranks=self.src_ranks, dst_ranks=self.dst_ranks)

    def shuffled(self) -> CanonicalModel:
        classes = list(self.model.classes)
        Random(self.shuffle).shuffle(classes)
        return replace(self.model, classes=tuple(classes))

    def held(self, spec: str, ranks: tuple[int, ...], full: Arrays) -> Local:
        return {g: expected_local(self.model, spec, r, full) for r, g in enumerate(ranks)}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    model = draw(any_models())
    fitting = any_specs(model).filter(lambda s: make_layout(model, s).world_size <= MOST_RANKS)
    src, dst = draw(fitting), draw(fitting)
    sizes = [make_layout(model, spec).world_size for spec in (src, dst)]
    kind = draw(st.sampled_from(["same", "other", "overlapping"]))
    ranks = [range(sizes[0]), range(sizes[1])]
    if kind == "other":
        ranks = [range(sizes[0]), range(sizes[0], sum(sizes))]
    if kind == "overlapping":
        rng = Random(draw(st.integers(0, 999)))
        world = range(max(sizes) + rng.randint(0, 3))
        ranks = [rng.sample(world, size) for size in sizes]
    return Case(model, src, dst, tuple(ranks[0]), tuple(ranks[1]), draw(st.integers(0, 999)))


def check_delivery(case: Case) -> None:
    """A proved plan fills every rank, twice in a row, whatever was planned or cached before."""
    plan, again = case.plan(), case.plan(case.shuffled())
    assert plan.digest == again.digest
    first = labels(case.model)
    second = {name: tensor[..., ::-1] + 1_000_000 for name, tensor in first.items()}
    src, dst = (case.held(case.src, case.src_ranks, full) for full in (first, second))
    assert_same(carried(plan, src), case.held(case.dst, case.dst_ranks, first))
    live = empty_tensors(plan)
    execute_inprocess(verify(plan), src, live)
    assert_same(live, case.held(case.dst, case.dst_ranks, first))
    for cache in (join, cross, of_copies, _make_table):
        cache.cache_clear()
    execute_inprocess(verify(again), dst, live)
    assert_same(live, case.held(case.dst, case.dst_ranks, second))


def check_ends(case: Case) -> None:
    """What is sent is what is received, in one order, and in the same buckets of any size."""
    plan = case.plan()
    sent, received = by_pair(plan)
    assert sent == received
    full, bucket_bytes = labels(case.model), 8 * Random(case.shuffle).choice([1, 5, 40, 10**6])
    src, dst = as_torch(case.held(case.src, case.src_ranks, full)), as_torch(empty_tensors(plan))
    shares = {
        rank: make_share(plan, rank, dtype=torch.int64, bucket_bytes=bucket_bytes)
        for rank in plan.ranks
    }
    sends = {
        (b.src_rank, b.dst_rank, b.dtype, b.number): b for s in shares.values() for b in s.sends
    }
    receives = [bucket for share in shares.values() for bucket in share.receives]
    assert len(sends) == len(receives)
    for into in receives:
        out = sends[into.src_rank, into.dst_rank, into.dtype, into.number]
        values = torch.cat([view.flatten() for view in out.of(src[out.src_rank])])
        places = into.of(dst[into.dst_rank])
        parts = values.split([place.numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            assert (place == 0).all(), f"{into} writes what has been written"
            place.copy_(part.view(place.shape))
    for rank, share in shares.items():
        for t in share.local:
            t.dst.of(dst[rank]).copy_(t.src.of(src[rank]))
    found = {rank: {n: t.numpy() for n, t in tensors.items()} for rank, tensors in dst.items()}
    assert_same(found, case.held(case.dst, case.dst_ranks, full))


def check_bytes(case: Case) -> None:
    """Nothing goes over the wire but what a rank needs and does not hold, each element once."""
    plan, full = case.plan(), labels(case.model)
    size_of = np.zeros(1 + max(int(x.max()) for x in full.values()), dtype=np.int64)
    for c in case.model.classes:
        size = ITEM if c.dtype is None else ITEMSIZE[c.dtype]
        for layer in range(*c.layers):
            for expert in range(*c.experts):
                size_of[full[c.name(layer, expert)].ravel()] = size
    held = numbers_of(case.held(case.src, case.src_ranks, full))
    least = sum(
        int(size_of[label]) * times
        for rank, needed in numbers_of(case.held(case.dst, case.dst_ranks, full)).items()
        for label, times in needed.items()
        if label not in held.get(rank, {})
    )
    counted = cost(plan, itemsize=ITEM)
    assert counted.wire_bytes == counted.minimum_bytes == least


def check_fingerprints_agree(case: Case) -> None:
    plan, full = case.plan(), labels(case.model)
    sides = (
        (plan.src, case.held(case.src, case.src_ranks, full)),
        (plan.dst, case.held(case.dst, case.dst_ranks, full)),
    )
    check_fingerprints(sorted(full), *(prints(layout, [*held.values()]) for layout, held in sides))


def prints(layout: Layout, shards: list[Arrays]) -> torch.Tensor:
    copies = find_copies(layout)
    parts = [
        local_fingerprints(copies, rank, as_torch({0: local})[0], dtype=torch.int64)
        for rank, local in enumerate(shards)
    ]
    return torch.stack(parts).sum(0)


def numbers_of(tensors: Mapping[int, Arrays]) -> dict[int, Counter[int]]:
    """By rank: how often it has each label; padding is no label."""
    found = {
        rank: Counter(int(x) for tensor in local.values() for x in tensor.ravel())
        for rank, local in tensors.items()
    }
    for counter in found.values():
        del counter[0]
    return found


def as_torch(tensors: Mapping[int, Arrays]) -> dict[int, dict[str, torch.Tensor]]:
    return {
        rank: {name: torch.tensor(np.ascontiguousarray(t)) for name, t in local.items()}
        for rank, local in tensors.items()
    }


CHECKS: list[Callable[[Case], None]] = [
    check_delivery,
    check_ends,
    check_bytes,
    check_fingerprints_agree,
]
laws = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


def run_corpus(check: Any, num_cases: int, *phases: Phase) -> None:
    @seeded(SEED)
    @settings(max_examples=num_cases, deadline=None, database=None, phases=phases)
    @given(cases())
    def run(case: Case) -> None:
        note(f"{case.src} on {case.src_ranks} -> {case.dst} on {case.dst_ranks}")
        check(case)

    run()


@laws
def test_random_plans_obey_every_law(check: Callable[[Case], None]) -> None:
    run_corpus(check, 18, Phase.generate)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@laws
def test_a_hundred_random_plans_obey_every_law(check: Callable[[Case], None]) -> None:
    run_corpus(check, 100, Phase.generate, Phase.shrink)
