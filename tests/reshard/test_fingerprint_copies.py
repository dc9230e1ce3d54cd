"""Fingerprints of elements that a layout holds several times: no copy escapes."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from shardloop.errors import FingerprintError, PlanError
from shardloop.layout import Box, Layout, make_layout
from shardloop.layout.strips import OWN, Strips, cat
from shardloop.reshard import fingerprint
from shardloop.reshard.copies import find_copies
from shardloop.reshard.fingerprint import check_fingerprints, local_fingerprints
from tests.reshard.handmade import random_layout, random_model
from tests.reshard.prints import K_PROJ, MODEL, NAMES, NORM, fingerprints, shards_of
from tests.transport.live import random_state

K_KEY = "self_attn.k_proj.weight"


@pytest.mark.parametrize("flipped", range(12))
def test_one_flipped_bit_in_any_copy_of_any_layout_is_found(flipped: int, seed: int) -> None:
    """Layouts with stages, experts, flat and overlapping parts, and tied heads."""
    rng = random.Random(f"{seed} {flipped}")
    model = random_model(rng)
    layout = random_layout(model, rng)
    state = random_state(model, seed=seed)
    names = tuple(sorted(model.tensor_shapes()))
    shards = shards_of(layout, state, torch.float32)
    good = fingerprints(layout, shards)
    rank = rng.randrange(layout.world_size)
    for piece in rng.sample(pieces := list(layout.pieces(rank)), k=min(5, len(pieces))):
        place = tuple(rng.randrange(hi - lo) for lo, hi in piece.box)
        bits = piece.of(shards[rank]).view(torch.int32)
        bits[place] ^= 1 << rng.randrange(31)
        bad = fingerprints(layout, shards)
        with pytest.raises(FingerprintError, match=f": {piece.name}($|\n)"):
            check_fingerprints(names, good, bad)
        if (
            copies_of(
                layout,
                piece.name,
                tuple(lo + i for (lo, _), i in zip(piece.box, place, strict=True)),
            )
            > 1
        ):
            with pytest.raises(FingerprintError, match=f"within the source .*{piece.name}"):
                check_fingerprints(names, bad, bad)
        bits[place] = state[piece.name][tuple(slice(*r) for r in piece.box)][place].view(
            torch.int32
        )
    assert torch.equal(fingerprints(layout, shards), good)


def copies_of(layout: Layout, name: str, place: tuple[int, ...]) -> int:
    """How many pieces of all ranks hold an element."""
    return sum(
        piece.name == name
        and all(lo <= i < hi for i, (lo, hi) in zip(place, piece.box, strict=True))
        for rank in range(layout.world_size)
        for piece in layout.pieces(rank)
    )


@pytest.mark.parametrize("number", range(1, 8))
def test_each_copy_of_many_is_compared(number: int) -> None:
    """For odd and even numbers of copies: any set of them that drifted alike is seen within."""
    layout = make_layout(MODEL, f"dp={number}")
    shards = shards_of(layout, random_state(MODEL), torch.float32)
    good = fingerprints(layout, shards)
    assert len(good) == 3
    for drifted in range(1, 2**number - 1):
        changed = [dict(tensors) for tensors in shards]
        for rank in range(number):
            if drifted & 1 << rank:
                changed[rank][NORM] = shards[rank][NORM] + 1
        bad = fingerprints(layout, changed)
        with pytest.raises(FingerprintError, match=f"within the source .*{NORM}"):
            check_fingerprints(NAMES, bad, good)


def test_work_on_a_rank_does_not_grow_with_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted: sums on one rank, rows of the tables, and prints. No rank's pieces are listed."""
    sums: list[Box] = []

    def counted(box: Box, values: Tensor, dtype: torch.dtype) -> int:
        sums.append(box)
        return 0

    def refused(layout: Layout, rank: int) -> None:
        raise AssertionError("walks the pieces of a rank")

    local = shards_of(make_layout(MODEL, "engine:tp=2"), random_state(MODEL), torch.float32)[0]
    monkeypatch.setattr(fingerprint, "_piece_sum", counted)
    monkeypatch.setattr(Layout, "pieces", refused)
    work = set()
    for replicas in (1, 64, 4096):
        sums.clear()
        copies = find_copies(make_layout(MODEL, f"engine:replicas={replicas},tp=2"))
        prints = local_fingerprints(copies, 0, local, dtype=torch.float32)
        rows = sum(len(s.row) for group in copies.holdings.values() for h in group for s in h.steps)
        work.add((len(sums), rows, prints.shape))
    assert len(work) == 1


@pytest.mark.parametrize("spec", ["dp=2", "dp=3,fsdp=2", "engine:tp=4"])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_copy_that_drifted_is_named_though_each_side_used_both(spec: str, side: str) -> None:
    """Each copy in turn; also when both sides hold the same mixture of old and new copies."""
    state = random_state(MODEL)
    layout = make_layout(MODEL, spec)
    good = fingerprints(layout, shards_of(layout, state, torch.float32), torch.float32)
    for rank in range(layout.world_size):
        shards = shards_of(layout, state, torch.float32)
        piece = next(p for p in layout.pieces(rank) if p.name == K_PROJ)
        piece.of(shards[rank])[(0,) * len(piece.box)] += 1
        bad = fingerprints(layout, shards, torch.float32)
        for src, dst in ((bad, bad), (bad, good) if side == "source" else (good, bad)):
            with pytest.raises(FingerprintError, match=f"copies within the {side} .*{K_PROJ}"):
                check_fingerprints(NAMES, src, dst)


def test_drifts_that_cancel_in_a_plain_sum_are_still_found() -> None:
    state = {name: t.abs() + 1 for name, t in random_state(MODEL).items()}
    layout = make_layout(MODEL, "dp=3")
    shards = shards_of(layout, state, torch.float32)
    for rank, change in ((1, 5), (2, -5)):
        shards[rank][K_PROJ].view(torch.int32)[0, 0] += change
    good = fingerprints(layout, shards_of(layout, state, torch.float32), torch.float32)
    with pytest.raises(FingerprintError, match=f"copies within the destination .*{K_PROJ}"):
        check_fingerprints(NAMES, good, fingerprints(layout, shards, torch.float32))


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 4), (5, 8)],
        [(0, 4), (2, 4), (6, 8)],  # as many elements as the tensor has
        [(0, 4), (5, 9)],  # and once more, beyond its end
        [(0, 8), (2, 10)],
        [],
    ],
)
def test_a_tensor_that_is_not_covered_is_refused_by_name(rows: Sequence[tuple[int, int]]) -> None:
    layout = make_layout(MODEL, f"fsdp={max(1, len(rows))}")
    tensor = next(t for t in layout.tensors if t.keys == (K_KEY,))
    boxes = np.array(rows, dtype=np.int64).reshape(-1, 2)
    part = np.arange(len(rows))
    strips = Strips(max(1, len(rows)), (OWN,), part, 0 * part, boxes[:, :1], boxes[:, 1:])
    cuts = (*tensor.cuts[:2], replace(tensor.cuts[2], strips=strips), *tensor.cuts[3:])
    tensors = tuple(replace(t, cuts=cuts) if t is tensor else t for t in layout.tensors)
    with pytest.raises(PlanError, match=f"no fingerprint.*\n  {K_KEY} in .*do not cover"):
        find_copies(replace(layout, tensors=tensors))


def test_an_element_twice_on_one_rank_is_refused_by_name() -> None:
    layout = make_layout(MODEL, "fsdp=1")
    tensor = next(t for t in layout.tensors if t.keys == (K_KEY,))
    twice = replace(tensor.cuts[2], strips=cat(tensor.cuts[2].strips, tensor.cuts[2].strips))
    cuts = (*tensor.cuts[:2], twice, *tensor.cuts[3:])
    tensors = tuple(replace(t, cuts=cuts) if t is tensor else t for t in layout.tensors)
    with pytest.raises(
        PlanError, match=f"{K_KEY} in .*a rank holds some elements of dims .* twice"
    ):
        find_copies(replace(layout, tensors=tensors))
