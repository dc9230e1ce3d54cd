"""Fingerprints are independent of the cut, and changed by any change."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from shardloop.errors import FingerprintError, LayoutError
from shardloop.families import CanonicalModel
from shardloop.layout import Layout, make_layout
from shardloop.reshard.fingerprint import _piece_sum, check_fingerprints
from tests.reshard.broken import SPECS, every_model
from tests.reshard.prints import MODEL, NAMES, NORM, Shards, fingerprints, shards_of
from tests.transport.live import assert_same, random_state, small_model

GATE_UP = "model.layers.0.mlp.gate_up_proj.weight"


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


def test_padding_and_the_old_content_of_padding_do_not_count() -> None:
    state = random_state(MODEL)
    layout = make_layout(MODEL, "engine:tp=4")  # 49 rows on 4 ranks: 3 rows of padding
    shards = shards_of(layout, state, torch.float32)
    good = fingerprints(layout, shards, torch.float32)
    shards[3]["lm_head.weight"][-3:] = torch.nan
    assert torch.equal(fingerprints(layout, shards, torch.float32), good)


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
