"""The delta of two tensors of one shape: made, applied, and as bytes. Floor 1.

Called by `delta.source` and `transport.delta`.

    header    6 int64      elements, values, bytes per gap symbol (0: dense), symbols, base, result
    values    the new bits of the changed elements; of all elements where that is not longer
    symbols   the positions of the changed elements (see `delta.gaps`)

Values are new bits, not differences: a delta that is applied twice does no harm, and a value needs
no old one to be right.

A version is named by the digest of its bits, not by a count. A target that slept, was restarted or
was left half written may remember a count that its memory no longer keeps; its digest says what it
really holds. `base` is the digest before and `result` the digest after, and both are checked before
the first element is written.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardloop.delta.digest import BLOCK, bits_of, digest, digest_after
from shardloop.delta.gaps import ESCAPES, decode_gaps, encode_gaps
from shardloop.errors import FingerprintError, PlanError

HEADER_LENGTH = 6
HEADER_BYTES = 8 * HEADER_LENGTH
SYMBOL_OF_SIZE = {symbol.itemsize: symbol for symbol in ESCAPES}


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What turns the bits of one tensor into those of another."""

    num_elements: int
    values: Tensor
    """Bits, int8, int16 or int32 [C]; of all elements if dense."""
    symbols: Tensor | None
    """int8 or int16; None: dense."""
    base: int
    """Digest that the target must have; any if dense."""
    result: int
    """Digest that it will have."""

    @property
    def num_bytes(self) -> int:
        """Length of the header and the payload."""
        symbols = 0 if self.symbols is None else self.symbols.nbytes
        return HEADER_BYTES + self.values.nbytes + symbols

    def header(self) -> Tensor:
        """int64 [HEADER_LENGTH] on the CPU."""
        symbols = (0, 0)
        if self.symbols is not None:
            symbols = (self.symbols.itemsize, len(self.symbols))
        return torch.tensor(
            [self.num_elements, len(self.values), *symbols, self.base, self.result],
            dtype=torch.int64,
        )

    def payload(self) -> Tensor:
        """uint8 [num_bytes - HEADER_BYTES]; shares memory with the values if dense."""
        values = self.values.view(torch.uint8)
        return (
            values if self.symbols is None else torch.cat([values, self.symbols.view(torch.uint8)])
        )


def payload_bytes(header: Tensor, *, itemsize: int) -> int:
    """How long the payload is that belongs to a header.

    Raises:
        FingerprintError: no delta has such a header.
    """
    num_elements, num_values, symbol_size, num_symbols, *_ = header.tolist()
    dense = symbol_size == 0 and num_symbols == 0 and num_values == num_elements
    sparse = symbol_size in SYMBOL_OF_SIZE and 0 <= num_values <= num_symbols
    num_bytes: int = num_values * itemsize + num_symbols * symbol_size
    if not (dense or sparse) or not 0 <= num_bytes <= num_elements * itemsize:
        raise FingerprintError(
            f"a delta arrived damaged: its header is {header.tolist()}; start a new transfer"
        )
    return num_bytes


def from_wire(header: Tensor, payload: Tensor, *, dtype: torch.dtype) -> Delta:
    """The delta of a header and its payload, for a tensor of `dtype`; may share their memory.

    Raises:
        FingerprintError: they do not belong together.
    """
    num_bytes = payload_bytes(header, itemsize=dtype.itemsize)
    if len(payload) != num_bytes:
        raise FingerprintError(
            f"a delta arrived damaged: {len(payload)} bytes, its header says {num_bytes}"
        )
    num_elements, num_values, symbol_size, _, base, result = header.tolist()
    end = num_values * dtype.itemsize
    symbols = None
    if symbol_size:  # at an address of their own: a view of wider elements must start at one
        symbols = payload[end:].clone().view(SYMBOL_OF_SIZE[symbol_size])
    return Delta(
        num_elements=num_elements,
        values=bits_of(payload[:end].view(dtype)),
        symbols=symbols,
        base=base,
        result=result,
    )


def encode(old: Tensor | None, new: Tensor, *, base: int | None = None) -> Delta:
    """What a holder of `old` needs to hold `new`, bit for bit.

    Elements are compared by their bits: 0.0 and -0.0 differ, and so do two NaNs of other bits.
    Dense where the sparse form would not be shorter. Scratch: some 40 bytes per changed element, so
    cut a large tensor into buckets.

    Args:
        old: None makes it dense.
        new: of the shape and dtype of `old`, any strides; a dense delta shares its memory.
        base: digest of `old`, if known: saves a pass over it.
    Raises:
        PlanError: shapes or dtypes differ, or elements are wider than 4 bytes.
    """
    after = bits_of(new)
    if old is None:
        return _dense(after)
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise PlanError(
            f"no delta from {old.dtype} {tuple(old.shape)} to {new.dtype} {tuple(new.shape)}: "
            "shape and dtype must be the same"
        )
    before = bits_of(old)
    # A gap takes a byte at least, so that more changes than this cannot be sparse and shorter.
    most = after.nbytes // (after.itemsize + 1)
    positions = changed_positions(before, after, most=most)
    if positions is None:
        return _dense(after)
    values, symbols = after.index_select(0, positions), encode_gaps(positions)
    if len(after) and values.nbytes + symbols.nbytes >= after.nbytes:
        return _dense(after)
    base = digest(before) if base is None else base
    return Delta(
        num_elements=len(after),
        values=values,
        symbols=symbols,
        base=base,
        result=digest_after(base, positions, before.index_select(0, positions), values),
    )


def apply(delta: Delta, tensor: Tensor, *, holds: int | None = None) -> None:
    """Write the new bits into `tensor`, all or none.

    A tensor that already has them is left as it is.

    Args:
        tensor: of the shape and dtype of the tensors that the delta was made of, any strides.
        holds: digest of `tensor`, if known: saves a pass over it.
    Raises:
        PlanError: another number or size of elements.
        FingerprintError: the tensor does not hold the base, or the delta is damaged. The tensor is
            unchanged; a dense delta (`encode(None, new)`) helps.
    """
    bits = bits_of(tensor)
    if (delta.num_elements, delta.values.dtype) != (len(bits), bits.dtype):
        raise PlanError(
            f"a delta of {delta.num_elements} elements of {delta.values.itemsize} bytes does not "
            f"fit a tensor of {len(bits)} elements of {bits.itemsize} bytes"
        )
    if delta.symbols is None:
        _check_result(delta, digest(delta.values))
        bits.copy_(delta.values)
    else:
        held = digest(bits) if holds is None else holds
        if held == delta.result:
            return
        positions = _checked_positions(delta, bits, held)
        bits.index_copy_(0, positions, delta.values)
    if not tensor.is_contiguous():
        tensor.copy_(bits.view(tensor.dtype).view(tensor.shape))


def changed_positions(before: Tensor, after: Tensor, *, most: int) -> Tensor | None:
    """Where two vectors of bits differ, int64 [C]; None if at more than `most` places."""
    found, num_found = [], 0
    for row, (old, new) in enumerate(zip(before.split(BLOCK), after.split(BLOCK), strict=True)):
        places = _places(old, new)
        num_found += len(places)
        if num_found > most:
            return None
        found.append(places.add_(row * BLOCK))
    return torch.cat(found)


def _places(old: Tensor, new: Tensor) -> Tensor:
    if old.device.type == "cpu":  # numpy finds them three times as fast there
        return torch.from_numpy(np.flatnonzero(old.numpy() != new.numpy()))
    return (old != new).nonzero().flatten()


def _dense(after: Tensor) -> Delta:
    return Delta(num_elements=len(after), values=after, symbols=None, base=0, result=digest(after))


def _checked_positions(delta: Delta, bits: Tensor, held: int) -> Tensor:
    if held != delta.base:
        raise FingerprintError(
            f"a delta does not apply: the tensor has digest {_name(held)}, the delta starts from "
            f"{_name(delta.base)}; a version was lost or others wrote the tensor: "
            "nothing was changed, send the whole tensor"
        )
    assert delta.symbols is not None, "a dense delta has no positions"
    positions = decode_gaps(
        delta.symbols, num_positions=len(delta.values), num_elements=delta.num_elements
    )
    before = bits.index_select(0, positions)
    _check_result(delta, digest_after(held, positions, before, delta.values))
    return positions


def _check_result(delta: Delta, result: int) -> None:
    if result != delta.result:
        raise FingerprintError(
            f"a delta arrived damaged: its result has digest {_name(result)} in place of "
            f"{_name(delta.result)}; nothing was changed, send it again"
        )


def _name(digest: int) -> str:
    return f"{digest % 2**64:016x}"
