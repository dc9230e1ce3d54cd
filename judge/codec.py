"""Values as bytes, between the judge and what it does not trust. Called on both sides.

No pickle: nothing is run while a value is read, and what is read is checked in full. A value is
None, a bool, an int, a float, a str, bytes, a dense CPU tensor, or a list, tuple or dict (with str
keys) of values.

    length of the header (8 bytes) | header: JSON, a tree | the bytes of all tensors and bytes
"""

import json
import socket
import struct
from collections.abc import Iterator
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

LENGTH: Final = struct.Struct("<Q")
DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
KINDS: Final = (type(None), bool, int, float, str, bytes, list, tuple, dict, Tensor)
MOST_DIMS: Final = 16


class CodecError(ValueError):
    """A value that cannot be sent, or bytes that are no value."""


class EndOfChannel(EOFError):
    """The other end is gone between two frames."""


def encode(value: object) -> bytes:
    """
    Raises:
        CodecError: a part of the value is of another type; the part is named.
    """
    buffers: list[bytes] = []
    try:
        tree = _tree(value, "value", buffers)
    except RecursionError as error:
        raise CodecError("the value is nested too deeply, or contains itself") from error
    except UnicodeEncodeError as error:
        raise CodecError(f"the value has a text that utf-8 does not know: {error}") from error
    header = json.dumps(tree, allow_nan=False).encode()
    return b"".join([LENGTH.pack(len(header)), header, *buffers])


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The inverse of `encode`; tensors own their memory.

    Raises:
        CodecError: the bytes are not those of a value.
    """
    view = memoryview(data)
    if len(view) < LENGTH.size:
        raise CodecError(f"{len(view)} bytes are no value")
    (length,) = LENGTH.unpack(view[: LENGTH.size])
    body = view[LENGTH.size :]
    if length > len(body):
        raise CodecError(f"the header should have {length} bytes, there are {len(body)}")
    try:
        tree = json.loads(bytes(body[:length]))
        reader = _Reader(body[length:])
        value = reader.value(tree)
    except (ValueError, RecursionError, TypeError, KeyError, OverflowError) as error:
        raise CodecError(f"not a value: {error}") from error
    if len(reader.rest):
        raise CodecError(f"{len(reader.rest)} bytes too many")
    return value


def send(line: socket.socket, value: object) -> None:
    """One frame: the length of the value's bytes, then they."""
    data = encode(value)
    line.sendall(LENGTH.pack(len(data)) + data)


def receive(line: socket.socket, *, most_bytes: int) -> Any:
    """The value of the next frame.

    Raises:
        EndOfChannel: there is none. CodecError: it is larger than `most_bytes`, or cut short, or no
            value.
    """
    head = _exactly(line, LENGTH.size)
    if not head:
        raise EndOfChannel
    (length,) = LENGTH.unpack(_whole(head, LENGTH.size))
    if length > most_bytes:
        raise CodecError(f"a frame of {length} bytes; at most {most_bytes} are read")
    return decode(_whole(_exactly(line, length), length))


def frames(data: bytes) -> Iterator[Any]:
    """The values of frames one after the other.

    Raises:
        CodecError: at the first that is cut short or no value.
    """
    view = memoryview(data)
    while view:
        (length,) = LENGTH.unpack(_whole(view[: LENGTH.size], LENGTH.size))
        yield decode(_whole(view[LENGTH.size : LENGTH.size + length], length))
        view = view[LENGTH.size + length :]


def _tree(value: object, where: str, buffers: list[bytes]) -> Any:
    if type(value) not in KINDS:  # exactly: a subclass could do anything
        kind = type(value)
        raise CodecError(f"{where} is of type {kind.__module__}.{kind.__qualname__}")
    match value:
        case float():
            return {"float": value.hex()}
        case str():
            return _sound(value)
        case bytes():
            buffers.append(value)
            return {"bytes": len(value)}
        case Tensor():
            return _tensor_tree(value, where, buffers)
        case list():
            return [_tree(item, f"{where}[{i}]", buffers) for i, item in enumerate(value)]
        case tuple():
            items = [_tree(item, f"{where}[{i}]", buffers) for i, item in enumerate(value)]
            return {"tuple": items}
        case dict():
            odd = [key for key in value if type(key) is not str]
            if odd:
                raise CodecError(f"{where} has a key of type {type(odd[0]).__name__}, not str")
            named = {_sound(k): _tree(v, f"{where}[{k!r}]", buffers) for k, v in value.items()}
            return {"dict": named}
    return value


def _tensor_tree(tensor: Tensor, where: str, buffers: list[bytes]) -> Any:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.dtype not in NAMES:
        raise CodecError(
            f"{where} is a tensor of {tensor.dtype} on {tensor.device} with layout "
            f"{tensor.layout}; it must be a dense tensor on the CPU of one of {', '.join(DTYPES)}"
        )
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    buffers.append(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return {"tensor": NAMES[tensor.dtype], "shape": list(tensor.shape)}


class _Reader:
    """Makes values of a tree, taking their bytes from `rest` in order."""

    def __init__(self, rest: memoryview) -> None:
        self.rest = rest

    def value(self, tree: Any) -> Any:
        match tree:
            case None | bool() | int():
                return tree
            case str():
                return _sound(tree)
            case list():
                return [self.value(item) for item in tree]
            case {"float": str(text), **others} if not others:
                return float.fromhex(text)
            case {"bytes": int(size), **others} if not others and _is_size(size):
                return bytes(self._take(size))
            case {"tuple": list(items), **others} if not others:
                return tuple(self.value(item) for item in items)
            case {"dict": dict(items), **others} if not others:
                return {_sound(key): self.value(item) for key, item in items.items()}
            case {"tensor": str(name), "shape": list(shape), **others} if not others:
                return self._tensor(DTYPES[name], shape)
        raise CodecError(f"there is no value that is written {str(tree)[:80]}")

    def _tensor(self, dtype: torch.dtype, shape: list[Any]) -> Tensor:
        if len(shape) > MOST_DIMS or not all(map(_is_size, shape)):
            raise CodecError(f"no tensor has the shape {shape}")
        data = bytearray(self._take(prod(shape) * dtype.itemsize))
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)

    def _take(self, size: int) -> memoryview:
        taken = _whole(self.rest[:size], size)
        self.rest = self.rest[size:]
        return taken


def _sound(text: str) -> str:
    """
    Raises:
        UnicodeEncodeError: it has half of a surrogate pair, which no file or terminal takes.
    """
    text.encode()
    return text


def _is_size(number: Any) -> bool:
    return type(number) is int and number >= 0  # a bool is an int, too


def _whole(data: memoryview, size: int) -> memoryview:
    if len(data) != size:
        raise CodecError(f"{size} bytes should follow, there are {len(data)}")
    return data


def _exactly(line: socket.socket, size: int) -> memoryview:
    """Fewer only at the end of the channel."""
    parts = bytearray()
    while len(parts) < size:
        more = line.recv(min(size - len(parts), 2**20))
        if not more:
            break
        parts += more
    return memoryview(parts)
