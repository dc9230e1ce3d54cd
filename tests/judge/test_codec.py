"""Values come back as they were sent, and bytes that are no value are refused without harm."""

import contextlib
import json
import math
import pickle
import random
import socket
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from judge.codec import (
    DTYPES,
    LENGTH,
    CodecError,
    EndOfChannel,
    decode,
    encode,
    frames,
    receive,
    send,
)


def same(a: Any, b: Any) -> bool:
    """Of the same types throughout, and equal bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return (math.isnan(a) and math.isnan(b)) if isinstance(a, float) and a != a else a == b


def random_tensor(rng: random.Random) -> Tensor:
    dtype = DTYPES[rng.choice(list(DTYPES))]
    shape = [rng.choice([0, 1, 2, 3, 5]) for _ in range(rng.randrange(4))]
    generator = torch.Generator().manual_seed(rng.randrange(2**32))
    values = torch.randint(0, 2, shape, generator=generator)
    if dtype != torch.bool:
        values = values * 100 + torch.randn(shape, generator=generator)
    tensor = values.to(dtype)
    return tensor.transpose(0, -1) if shape and rng.random() < 0.5 else tensor


def random_value(rng: random.Random, depth: int = 3) -> Any:
    makers = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.randrange(-(2**80), 2**80),
        lambda: rng.choice([0.1, -0.0, math.inf, -math.inf, math.nan, 5e-324]),
        lambda: "".join(rng.choice('aé\0\n\U0001f600"') for _ in range(rng.randrange(5))),
        lambda: rng.randbytes(rng.randrange(5)),
        lambda: random_tensor(rng),
    ]
    if depth:
        inner = lambda: random_value(rng, depth - 1)  # noqa: E731
        makers += [
            lambda: [inner() for _ in range(rng.randrange(4))],
            lambda: tuple(inner() for _ in range(rng.randrange(4))),
            lambda: {f"key {i}": inner() for i in range(rng.randrange(4))},
        ]
    return rng.choice(makers)()


@pytest.mark.parametrize("seed", range(200))
def test_a_value_comes_back_as_it_was(seed: int) -> None:
    value = random_value(random.Random(seed))
    assert same(decode(encode(value)), value), value


@pytest.mark.parametrize("seed", range(200))
def test_damaged_bytes_are_a_value_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(encode([random_value(rng), random_tensor(rng)]))
    match rng.randrange(3):
        case 0:
            del data[rng.randrange(len(data)) :]
        case 1:
            data += rng.randbytes(1 + rng.randrange(9))
        case 2:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    with contextlib.suppress(CodecError):
        decode(data)


class Sly(Tensor):
    pass


CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [object()]}, r"value\['a'\]\[0\] is of type builtins.object"),
        (torch.nn.Parameter(torch.ones(1)), "torch.nn.parameter.Parameter"),
        (torch.ones(1).as_subclass(Sly), "Sly"),
        (type("Number", (int,), {})(1), "Number"),
        (torch.ones(2, device="meta"), "on meta"),
        (torch.ones(2).to_sparse(), "torch.sparse_coo"),
        (torch.ones(2, dtype=torch.complex64), "torch.complex64"),
        ({1: 2}, "key of type int"),
        (CIRCLE, "contains itself"),
        ("\ud800", "utf-8"),
    ],
)
def test_what_is_no_value_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        encode(value)


def written(tree: Any, rest: bytes = b"") -> bytes:
    header = json.dumps(tree).encode()
    return LENGTH.pack(len(header)) + header + rest


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps([1]),
        written({"tensor": "float32", "shape": [10**9, 10**9]}),
        written({"tensor": "float32", "shape": [-1, -1]}, bytes(4)),
        written({"tensor": "float32", "shape": [True]}, bytes(4)),
        written({"tensor": "float32", "shape": [0] * 100}),
        written({"tensor": "float32", "shape": [0, 10**30]}),
        written({"tensor": "complex64", "shape": [1]}, bytes(8)),
        written({"bytes": -1}),
        written({"bytes": True}, bytes(1)),
        written({"float": "0x1p99999"}),
        written({"tuple": [], "dict": {}}),
        written(1.5),
        LENGTH.pack(2**20) + b"[" * 2**20,
        LENGTH.pack(10**5) + b"9" * 10**5,
        LENGTH.pack(2**64 - 1),
    ],
)
def test_bytes_that_say_too_much_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        decode(data)


def test_frames_arrive_in_order_and_then_the_end() -> None:
    ours, theirs = socket.socketpair()
    values = [random_value(random.Random(seed)) for seed in range(20)]
    with ours, theirs:
        sender = threading.Thread(target=lambda: [send(theirs, value) for value in values])
        sender.start()
        assert all(same(receive(ours, most_bytes=10**6), value) for value in values)
        sender.join()
        theirs.close()
        with pytest.raises(EndOfChannel):
            receive(ours, most_bytes=10**6)


def test_a_frame_beyond_the_limit_is_refused_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(LENGTH.pack(2**50))
        with pytest.raises(CodecError, match="at most 1000 are read"):
            receive(ours, most_bytes=1000)


def test_frames_that_are_cut_short_are_refused_after_those_that_are_whole() -> None:
    data = b"".join(LENGTH.pack(len(encode(n))) + encode(n) for n in range(3))
    assert list(frames(data)) == [0, 1, 2]
    size = len(data) // 3
    for end in range(len(data)):
        whole = []
        if end % size:
            with pytest.raises(CodecError):
                whole.extend(frames(data[:end]))
        else:
            whole.extend(frames(data[:end]))
        assert whole == list(range(end // size))
