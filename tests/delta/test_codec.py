"""Laws of the delta of two tensors: exact to the bit, never longer than needed, all or nothing."""

import pytest
import torch
from torch import Tensor

from shardloop.delta.codec import HEADER_BYTES, Delta, apply, encode, from_wire
from shardloop.delta.digest import BLOCK, INT_OF_SIZE, bits_of, digest, signed
from shardloop.delta.gaps import decode_gaps, encode_gaps
from shardloop.delta.source import DeltaSource
from shardloop.errors import FingerprintError, PlanError

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
SIZES = [0, 1, 2, 3, 254, 255, 256, 1000, BLOCK - 1, BLOCK + 1, 3 * BLOCK + 7]
DENSITIES = [0.0, 1e-4, 0.002, 0.015, 0.2, 0.5, 0.7, 0.99, 1.0]


def _random_bits(size: int, dtype: torch.dtype) -> Tensor:
    """Any bits at all: infinities, NaNs of every payload, both zeros."""
    return torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def _changed(old: Tensor, density: float) -> Tensor:
    new = old.clone()
    bits = bits_of(new)
    where = torch.rand(len(bits)) < density
    bits[where] ^= torch.randint(1, 127, (int(where.sum()),)).to(bits.dtype)
    return new


def _over_the_wire(delta: Delta, dtype: torch.dtype) -> Delta:
    header, payload = delta.header(), delta.payload().clone()
    assert HEADER_BYTES + len(payload) == delta.num_bytes
    return from_wire(header, payload, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_delta_of_any_bits_gives_the_new_bits_and_is_never_longer_than_dense(
    dtype: torch.dtype, seed: int
) -> None:
    for size in SIZES:
        for density in DENSITIES:
            old = _random_bits(size, dtype)
            new = _changed(old, density)
            delta = encode(old, new)
            assert delta.num_bytes <= HEADER_BYTES + new.nbytes
            target = old.clone()
            apply(_over_the_wire(delta, dtype), target)
            assert torch.equal(bits_of(target), bits_of(new)), (size, density)
            apply(_over_the_wire(delta, dtype), target)
            assert torch.equal(bits_of(target), bits_of(new)), "a second time does harm"
            num_changed = int((bits_of(old) != bits_of(new)).sum())
            assert delta.symbols is None or len(delta.values) == num_changed


def test_equal_tensors_need_a_header_alone() -> None:
    old = _random_bits(100_000, torch.bfloat16)
    assert encode(old, old.clone()).num_bytes == HEADER_BYTES


def test_zeros_of_other_sign_and_nans_of_other_payload_are_changes() -> None:
    old = torch.zeros(1000, dtype=torch.bfloat16)
    old[7] = float("nan")
    new = old.clone()
    new[3] = -0.0
    bits_of(new)[7] += 1
    delta = encode(old, new)
    assert len(delta.values) == 2
    apply(delta, old)
    assert torch.equal(bits_of(old), bits_of(new))


def test_views_of_any_strides_are_read_and_written_in_their_own_order(seed: int) -> None:
    base = torch.randn(60, 2, 50).bfloat16()
    old = base[:, 1, ::2].t()
    new = _changed(old, 0.05)
    around = base.clone()
    apply(encode(old, new), old)
    assert torch.equal(bits_of(old), bits_of(new))
    assert torch.equal(base[:, 0], around[:, 0]), "an element beside the view was written"
    assert torch.equal(base[:, 1, 1::2], around[:, 1, 1::2])


@pytest.mark.parametrize("lowest", [0, 1, 253, 254, 255, 256, 509, 510, 65534, 65535, 65536])
def test_gaps_of_any_length_come_back(lowest: int, seed: int) -> None:
    for num_short in (0, 5, 5000):
        gaps = torch.cat([torch.randint(0, 9, (num_short,)), torch.tensor([lowest, 200_000])])
        gaps = torch.cat([gaps, torch.tensor([lowest, 0, 70_000, lowest])])
        positions = (gaps + 1).cumsum(0) - 1
        symbols = encode_gaps(positions)
        size = int(positions[-1]) + 1
        found = decode_gaps(symbols, num_positions=len(positions), num_elements=size)
        assert torch.equal(found, positions)
        with pytest.raises(FingerprintError, match="damaged"):
            decode_gaps(symbols, num_positions=len(positions), num_elements=size - 1)


@pytest.mark.parametrize(
    ("density", "limit"), [(0.001, 4.1), (0.01, 3.2), (0.015, 3.1), (0.05, 3.01), (0.2, 3.01)]
)
def test_bytes_per_changed_element_stay_low(density: float, limit: float, seed: int) -> None:
    """At 1.5 %: 2 of the value and about 1 of the position."""
    old = torch.randn(1_000_000).bfloat16()
    delta = encode(old, _changed(old, density))
    assert delta.num_bytes <= limit * len(delta.values) + HEADER_BYTES


def test_dense_form_begins_where_the_sparse_one_would_be_as_long() -> None:
    """Of n bfloat16 elements side by side, c changed ones take 3 c bytes, all of them 2 n."""
    old = torch.zeros(300, dtype=torch.bfloat16)
    for num_changed in range(190, 210):
        new = old.clone()
        new[:num_changed] = 1.0
        assert (encode(old, new).symbols is None) == (3 * num_changed >= 2 * 300)


def test_digest_is_the_weighted_sum_of_all_bits_and_follows_a_change(seed: int) -> None:
    for size in (1, 10, BLOCK, 2 * BLOCK + 9):
        tensor = _random_bits(size, torch.bfloat16)
        unit = torch.zeros(size, dtype=torch.bfloat16)
        places = torch.randint(0, size, (20,)).unique()
        for place in places.tolist():
            bits_of(unit).zero_()[place] = 1
            weight = digest(unit)
            assert weight % 2 == 1
            flipped = tensor.clone()
            bits = bits_of(flipped)
            bits[place] ^= 1 << int(torch.randint(0, 15, ()))
            step = int(bits[place]) - int(bits_of(tensor)[place])
            assert digest(flipped) == signed(digest(tensor) + weight * step)
            assert digest(flipped) != digest(tensor)


def test_digest_sees_two_elements_that_change_places(seed: int) -> None:
    tensor = torch.randn(2 * BLOCK).bfloat16()
    for _ in range(50):
        first, second = torch.randint(0, len(tensor), (2,)).tolist()
        other = tensor.clone()
        other[first], other[second] = tensor[second], tensor[first]
        same = torch.equal(bits_of(other), bits_of(tensor))
        assert (digest(other) == digest(tensor)) == same


def _pair(density: float = 0.02, size: int = 5000) -> tuple[Tensor, Tensor]:
    old = torch.randn(size).bfloat16()
    return old, _changed(old, density)


@pytest.mark.parametrize("dense", [False, True])
def test_a_flipped_bit_of_the_payload_is_an_error_and_writes_nothing(
    dense: bool, seed: int
) -> None:
    old, new = _pair()
    delta = encode(None if dense else old, new)
    assert (delta.symbols is None) == dense
    for _ in range(300):
        payload = delta.payload().clone()
        place = int(torch.randint(0, len(payload), ()))
        payload[place] ^= 1 << int(torch.randint(0, 8, ()))
        target = old.clone()
        with pytest.raises(FingerprintError, match="damaged"):
            apply(from_wire(delta.header(), payload, dtype=torch.bfloat16), target)
        assert torch.equal(bits_of(target), bits_of(old))


def test_a_delta_on_another_base_is_an_error_and_writes_nothing(seed: int) -> None:
    old, new = _pair()
    delta = encode(old, new)
    other = old.clone()
    bits_of(other)[int(torch.randint(0, len(old), ()))] ^= 1
    before = other.clone()
    with pytest.raises(FingerprintError, match=r"a version was lost .* send the whole tensor"):
        apply(delta, other)
    assert torch.equal(bits_of(other), bits_of(before))


def test_headers_that_no_delta_has_are_refused(seed: int) -> None:
    old, new = _pair()
    delta = encode(old, new)
    header, payload = delta.header(), delta.payload()
    for place, value in ((0, 3), (1, -1), (1, 10**6), (2, 3), (2, 0), (3, 0), (3, 10**12)):
        wrong = header.clone()
        wrong[place] = value
        with pytest.raises(FingerprintError, match="damaged"):
            from_wire(wrong, payload, dtype=torch.bfloat16)
    with pytest.raises(FingerprintError, match="bytes, its header says"):
        from_wire(header, payload[:-1], dtype=torch.bfloat16)


def test_what_does_not_fit_is_refused_with_both_sides_named() -> None:
    old, new = _pair()
    with pytest.raises(PlanError, match=r"bfloat16 \(5000,\) to torch.float32 \(5000,\)"):
        encode(old, new.float())
    with pytest.raises(PlanError, match=r"5000 elements of 2 bytes .* 4999 elements of 2 bytes"):
        apply(encode(old, new), old[1:])
    with pytest.raises(PlanError, match=r"torch.float64 is not possible: .* have 8 bytes"):
        encode(None, torch.zeros(3, dtype=torch.float64))
    assert set(INT_OF_SIZE) == {1, 2, 4}


def test_updates_in_a_row_equal_a_fresh_copy_and_a_lost_one_is_answered_dense(seed: int) -> None:
    source, target = DeltaSource(), torch.zeros(4000, dtype=torch.bfloat16)
    weights = torch.randn(4000).bfloat16()
    kinds = []
    for version in range(8):
        delta = source.update(weights, holds=digest(target))
        kinds.append("dense" if delta.symbols is None else "sparse")
        if version != 5:  # lost on the way
            apply(_over_the_wire(delta, torch.bfloat16), target)
            assert torch.equal(bits_of(target), bits_of(weights))
        if version == 3:
            target.fill_(float("nan"))  # a sleep without memory
        weights = _changed(weights, 0.02)
    assert source.num_bytes == target.nbytes
    assert kinds == ["dense", "sparse", "sparse", "sparse", "dense", "sparse", "dense", "sparse"]
