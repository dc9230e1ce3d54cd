"""Laws of fingerprints: independent of the cut, changed by any change, and no copy escapes."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from shardloop.errors import FingerprintError, LayoutError, PlanError
from shardloop.families import CanonicalModel
from shardloop.layout import Box, Layout, make_layout
from shardloop.layout.strips import OWN, Strips, cat
from shardloop.reshard import fingerprint
from shardloop.reshard.copies import find_copies
from shardloop.reshard.fingerprint import _piece_sum, check_fingerprints, local_fingerprints
from tests.reshard.broken import SPECS, every_model
from tests.reshard.handmade import random_layout, random_model
from tests.transport.live import assert_same, cut, random_state, small_model

MODEL = small_model()
NAMES = tuple(sorted(MODEL.tensor_shapes()))
NORM = "model.norm.weight"
GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
K_KEY = "self_attn.k_proj.weight"
Shards = list[dict[str, Tensor]]


def shards_of(layout: Layout, state: Mapping[str, Tensor], dtype: torch.dtype) -> Shards:
    return [cut(layout, rank, state, dtype=dtype) for rank in range(layout.world_size)]


def fingerprints(layout: Layout, shards: Shards, dtype: torch.dtype = torch.float32) -> Tensor:
    copies = find_copies(layout)
    parts = [
        local_fingerprints(copies, rank, tensors, dtype=dtype)
        for rank, tensors in enumerate(shards)
    ]
    return torch.stack(parts).sum(0)


@pytest.fixture(params=[torch.float64, torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def test_every_layout_of_one_model_has_one_fingerprint(dtype: torch.dtype, seed: int) -> None:
    state = random_state(MODEL, seed=seed)
    whole = make_layout(MODEL, "fsdp=1")
    expected = fingerprints(whole, shards_of(whole, state, dtype), dtype)
    assert len(set(expected[0].tolist())) == len(NAMES)
    for spec in ("fsdp=3", "fsdp=30", "tp=4", "fsdp=2,tp=2", "dp=2,fsdp=2", "engine:tp=4"):
        layout = make_layout(MODEL, spec)
        found = fingerprints(layout, shards_of(layout, state, dtype), dtype)
        assert torch.equal(found, expected), spec
        check_fingerprints(NAMES, expected, found)


def kept_in_own_dtypes(layout: Layout, state: Mapping[str, Tensor], dtype: torch.dtype) -> Shards:
    """Local tensors in the dtype of their class where it has one, else in `dtype`."""
    shards = shards_of(layout, state, torch.float32)
    for rank, tensors in enumerate(shards):
        for name, own in layout.local_dtypes(rank).items():
            tensors[name] = tensors[name].to(getattr(torch, own) if own else dtype)
    return shards


@pytest.mark.parametrize("model", every_model(), ids=lambda model: model.name)
def test_stages_experts_flat_parts_scales_and_tied_copies_have_one_fingerprint(
    model: CanonicalModel, seed: int
) -> None:
    state = random_state(model, seed=seed)
    prints = {}
    for spec in ("fsdp=1", *SPECS):
        try:
            layout = make_layout(model, spec)
        except LayoutError:
            continue
        prints[spec] = fingerprints(
            layout, kept_in_own_dtypes(layout, state, torch.bfloat16), torch.bfloat16
        )
    assert len(prints) >= 8
    names = tuple(sorted(model.tensor_shapes()))
    for found in prints.values():
        check_fingerprints(names, prints["fsdp=1"], found)


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


def test_float32_masters_match_a_bfloat16_engine() -> None:
    state = random_state(MODEL)
    src, dst = make_layout(MODEL, "fsdp=3"), make_layout(MODEL, "engine:tp=2")
    a = fingerprints(src, shards_of(src, state, torch.float32), torch.bfloat16)
    b = fingerprints(dst, shards_of(dst, state, torch.bfloat16), torch.bfloat16)
    check_fingerprints(NAMES, a, b)


def test_the_sum_is_that_of_the_definition() -> None:
    """Against Python integers, element by element, on a tensor larger than one block."""
    model = small_model(vocab_size=3001, tie_word_embeddings=True)
    name = "model.embed_tokens.weight"
    state = random_state(model)
    layout = make_layout(model, "fsdp=1")
    column = sorted(model.tensor_shapes()).index(name)
    found = fingerprints(layout, [state], torch.float32)[0, column]
    rows, cols = ([_weight(d, i) for i in range(n)] for d, n in enumerate(state[name].shape))
    bits = state[name].view(torch.int32).tolist()
    total = sum(
        _mix(b) * w * v
        for line, w in zip(bits, rows, strict=True)
        for b, v in zip(line, cols, strict=True)
    )
    assert (total - int(found)) % 2**64 == 0


def _weight(dim: int, index: int) -> int:
    x = ((dim + 1) * 2**48 + index + 1) * 0x9E3779B97F4A7C15 % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) | 1


def _mix(bits: int) -> int:
    """Of 32 bits, as a signed number."""
    x = bits % 2**32
    x ^= x >> 16
    return x - 2**32 if x >= 2**31 else x


def test_taking_a_fingerprint_changes_no_weight(dtype: torch.dtype) -> None:
    layout = make_layout(MODEL, "engine:tp=2")
    shards, untouched = (shards_of(layout, random_state(MODEL), dtype) for _ in range(2))
    fingerprints(layout, shards, dtype)
    for tensors, before in zip(shards, untouched, strict=True):
        assert_same(tensors, before)


def test_no_two_changes_of_sign_cancel(dtype: torch.dtype, seed: int) -> None:
    """Of all pairs among 1176 elements, and none alone: what each adds to the sum is its own."""
    weight = random_state(MODEL, seed=seed)["model.embed_tokens.weight"].to(dtype)
    layout, name = make_layout(MODEL, "fsdp=1"), "model.embed_tokens.weight"
    piece = next(piece for piece in layout.pieces(0) if piece.name == name)
    before = _piece_sum(piece.box, weight, dtype)
    changes = []
    for place in range(weight.numel()):
        weight.view(-1)[place].neg_()
        changes.append((_piece_sum(piece.box, weight, dtype) - before) % 2**64)
        weight.view(-1)[place].neg_()
    both_ways = {0, *changes, *(-change % 2**64 for change in changes)}
    assert len(both_ways) == 1 + 2 * len(changes)


def negate_two(shards: Shards) -> None:
    shards[0][GATE_UP][0, :2].neg_()


def negate_all(shards: Shards) -> None:
    for tensors in shards:
        tensors[GATE_UP].neg_()


def swap_rows(shards: Shards) -> None:
    shards[0][GATE_UP][[0, 1]] = shards[0][GATE_UP][[1, 0]]


def double_two(shards: Shards) -> None:
    shards[0][GATE_UP][0, :2] *= 2


def swap_equal_shapes(shards: Shards) -> None:
    for tensors in shards:
        other = GATE_UP.replace(".0.", ".1.")
        tensors[GATE_UP], tensors[other] = tensors[other], tensors[GATE_UP]


@pytest.mark.parametrize(
    "corrupt", [negate_two, negate_all, swap_rows, double_two, swap_equal_shapes]
)
def test_what_bugs_do_to_weights_changes_the_fingerprint(
    corrupt: Callable[[Shards], None], dtype: torch.dtype, seed: int
) -> None:
    state = random_state(MODEL, seed=seed)
    src, dst = make_layout(MODEL, "fsdp=2"), make_layout(MODEL, "engine:tp=2")
    good = fingerprints(src, shards_of(src, state, dtype), dtype)
    shards = shards_of(dst, state, dtype)
    check_fingerprints(NAMES, good, fingerprints(dst, shards, dtype))
    corrupt(shards)
    with pytest.raises(FingerprintError, match=r"differ: model\.layers\.0\.mlp\.gate_proj\.weight"):
        check_fingerprints(NAMES, good, fingerprints(dst, shards, dtype))


@pytest.mark.parametrize("spec", ["dp=2", "dp=3", "dp=4", "engine:replicas=3,tp=4"])
def test_one_change_of_sign_in_one_of_many_copies_is_found(
    spec: str, dtype: torch.dtype, seed: int
) -> None:
    """The single element, then the whole tensor, of each copy in turn."""
    state = random_state(MODEL, seed=seed)
    layout = make_layout(MODEL, spec)
    shards = shards_of(layout, state, dtype)
    good = fingerprints(layout, shards, dtype)
    for tensors in shards:
        for part in (tensors[NORM][-1:], tensors[NORM]):
            part.neg_()
            with pytest.raises(FingerprintError, match=f"copies within the source .*{NORM}"):
                check_fingerprints(NAMES, fingerprints(layout, shards, dtype), good)
            part.neg_()


@pytest.mark.parametrize("bit", [0, 7, 15])
def test_one_flipped_bit_is_named_wherever_it_is(bit: int, seed: int) -> None:
    state = random_state(MODEL, seed=seed)
    src, dst = make_layout(MODEL, "fsdp=2"), make_layout(MODEL, "engine:tp=2")
    good = fingerprints(src, shards_of(src, state, torch.bfloat16), torch.bfloat16)
    shards = shards_of(dst, state, torch.bfloat16)
    flip = -(2**15) if bit == 15 else 2**bit
    for piece in dst.pieces(1):
        place = tuple(s.stop - 1 for s in piece.view.slices)
        bits = shards[1][piece.local_name].view(torch.int16)
        bits[place] ^= flip
        with pytest.raises(FingerprintError, match=f": {piece.name}($|\n)"):
            check_fingerprints(NAMES, good, fingerprints(dst, shards, torch.bfloat16))
        bits[place] ^= flip


def test_swapped_elements_rows_and_halves_change_the_fingerprint() -> None:
    state = random_state(MODEL)
    layout = make_layout(MODEL, "fsdp=1")
    good = fingerprints(layout, [state], torch.float32)
    down = "model.layers.1.mlp.down_proj.weight"
    swaps = {
        "rows": state[down].flip(0),
        "columns": state[down].flip(1),
        "halves": state[down].roll(12, 0),
        "norm": state[down],
    }
    for what, tensor in swaps.items():
        changed = {**state, down: tensor}
        name = down
        if what == "norm":
            name = "model.norm.weight"
            changed[name] = state[name].roll(1)
        with pytest.raises(FingerprintError, match=name):
            check_fingerprints(NAMES, good, fingerprints(layout, [changed], torch.float32))


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


def test_padding_and_the_old_content_of_padding_do_not_count() -> None:
    state = random_state(MODEL)
    layout = make_layout(MODEL, "engine:tp=4")  # 49 rows on 4 ranks: 3 rows of padding
    shards = shards_of(layout, state, torch.float32)
    good = fingerprints(layout, shards, torch.float32)
    shards[3]["lm_head.weight"][-3:] = torch.nan
    assert torch.equal(fingerprints(layout, shards, torch.float32), good)


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


def test_a_class_with_a_dtype_of_its_own_is_compared_in_it() -> None:
    """The lowest bit of a float32 scale, in weights that else move as bfloat16."""
    model = every_model()[-1]
    layout = make_layout(model, "engine:tp=2")
    names = tuple(sorted(model.tensor_shapes()))
    shards = kept_in_own_dtypes(layout, random_state(model), torch.bfloat16)
    good = fingerprints(layout, shards, torch.bfloat16)
    scale = next(p for p in layout.pieces(0) if p.name.endswith("weight_scale_inv"))
    scale.of(shards[0]).view(torch.int32)[0, 0] ^= 1
    with pytest.raises(FingerprintError, match=scale.name):
        check_fingerprints(names, good, fingerprints(layout, shards, torch.bfloat16))
