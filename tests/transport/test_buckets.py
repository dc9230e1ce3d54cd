"""Laws of streams and buckets: nothing is lost in a cut, and both ends cut alike."""

import random
from typing import Any

import pytest
import torch

from shardloop.layout.layout import View
from shardloop.reshard.plan import plan_reshard
from shardloop.transport.buckets import Bucket, Share, Step, cut_parts, flat_range, make_share
from tests.transport.live import layouts


def test_flat_ranges_visit_each_element_once_in_order(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(200):
        shape = [draw(1, 6) for _ in range(draw(1, 4))]
        storage = torch.arange(10_000)[: int(torch.tensor(shape).prod()) * 8]
        steps = [draw(1, 3) for _ in shape]
        storage = storage.reshape([n * 2 for n in shape] + [-1])[..., 0]
        view = storage[tuple(slice(0, n * s, s) for n, s in zip(shape, steps, strict=True))]
        start = draw(0, view.numel() + 1)
        stop = draw(start, view.numel() + 1)
        parts = [part.flatten() for part in flat_range(view, start, stop) if stop > start]
        found = torch.cat([torch.empty(0, dtype=torch.int64), *parts])
        assert torch.equal(found, view.flatten()[start:stop])


def test_cuts_hold_every_element_once_in_order_within_the_limit(seed: int) -> None:
    """And a view is cut only where it alone is over the limit."""
    draw = random.Random(seed).randint
    for _ in range(300):
        limit = draw(1, 9)
        views = [(View(str(i), (), (), ()), draw(1, 30)) for i in range(draw(1, 12))]
        cuts = list(cut_parts(views, limit=limit))
        assert all(0 < sum(part.hi - part.lo for part in parts) <= limit for parts in cuts)
        found = [
            (part.view.local_name, i) for p in cuts for part in p for i in range(part.lo, part.hi)
        ]
        assert found == [(view.local_name, i) for view, size in views for i in range(size)]
        sizes = {view.local_name: size for view, size in views}
        whole = [part for parts in cuts for part in parts if sizes[part.view.local_name] <= limit]
        assert all(part.hi - part.lo == sizes[part.view.local_name] for part in whole)


PAIRS = [
    ("fsdp=3", "engine:tp=2", [0, 1, 2], [3, 4]),
    ("fsdp=2,tp=2", "engine:tp=4", [0, 1, 2, 3], [3, 1, 0, 5]),
    ("dp=2,fsdp=2", "engine:replicas=2,tp=2", [0, 1, 2, 3], [4, 5, 6, 7]),
]


@pytest.mark.parametrize("case", PAIRS, ids=lambda case: f"{case[0]}->{case[1]}")
@pytest.mark.parametrize("bucket_bytes", [2, 130, 10**6])
def test_both_ends_cut_the_same_buckets_and_take_them_in_one_order(
    case: tuple[str, str, list[int], list[int]], bucket_bytes: int
) -> None:
    """The order is one of all ranks: where two ranks share two buckets, both take them alike; and
    no rank meets two others in one step."""
    src_spec, dst_spec, src_ranks, dst_ranks = case
    plan = plan_reshard(*layouts(src_spec, dst_spec), src_ranks=src_ranks, dst_ranks=dst_ranks)
    ranks = sorted({*src_ranks, *dst_ranks})
    shares = {
        rank: make_share(plan, rank, dtype=torch.bfloat16, bucket_bytes=bucket_bytes)
        for rank in ranks
    }
    ends: dict[tuple[int, int], list[list[tuple[Any, ...]]]] = {}
    for share in shares.values():
        for buckets in (share.sends, share.receives):
            of_pair: dict[tuple[int, int], list[tuple[Any, ...]]] = {}
            for bucket in buckets:
                runs = [part[1:] for part in bucket.parts]
                text = (bucket.number, bucket.dtype, bucket.num_bytes, runs)
                of_pair.setdefault((bucket.src_rank, bucket.dst_rank), []).append(text)
            for pair, found in of_pair.items():
                ends.setdefault(pair, []).append(found)
    assert ends and all(len(both) == 2 and both[0] == both[1] for both in ends.values())
    assert _can_finish(shares)


def _can_finish(shares: dict[int, Share]) -> bool:
    """Each rank stands at a step until all its messages are posted at their other ends too."""
    left = {rank: list(share.steps) for rank, share in shares.items()}
    posted: set[Any] = set()
    while any(left.values()):
        for steps in left.values():
            for end in ("send", "receive") if steps else ():
                bucket = getattr(steps[0], end)
                posted |= {(end, _key(bucket))} if bucket else set()
        met = [rank for rank, steps in left.items() if steps and _ends(steps[0]) <= posted]
        if not met:
            return False
        for rank in met:
            left[rank].pop(0)
    return True


def _ends(step: Step) -> set[Any]:
    """Both ends of both messages of a step."""
    buckets = [bucket for bucket in step if bucket]
    return {(end, _key(bucket)) for bucket in buckets for end in ("send", "receive")}


def _key(bucket: Bucket) -> tuple[Any, ...]:
    return bucket.src_rank, bucket.dst_rank, bucket.dtype, bucket.number
