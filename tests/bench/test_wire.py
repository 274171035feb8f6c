"""Values survive the wire, and bytes that are no message are refused."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flashrt.bench.equality import same
from flashrt.errors import InputError
from flashrt.runtime.wire import LENGTHS, Connection, Tensor, pack, unpack

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
ARRAYS = hnp.arrays(
    hnp.floating_dtypes() | hnp.integer_dtypes() | hnp.boolean_dtypes(), hnp.array_shapes(min_dims=0, max_side=4)
)
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    | st.tuples(inner, inner),
    max_leaves=8,
)  # fmt: skip


def sent(value: Any, *, torch: bool = False) -> Any:
    buffers = pack({"kind": "x"}, value)
    return unpack(bytes(buffers[1]), b"".join(bytes(b) for b in buffers[2:]), torch=torch)["value"]


@given(VALUES)
def test_any_nesting_of_values_arrives_as_it_left(value: Any) -> None:
    assert same_or_nan(sent(value), value)


def same_or_nan(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_or_nan(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(same_or_nan(x, y) for x, y in zip(a, b, strict=True))
    return same(a, b)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64, torch.bool]
)
def test_tensors_arrive_with_their_type_and_bits(dtype: torch.dtype) -> None:
    tensor = (torch.arange(12).reshape(3, 4) - 5).to(dtype)
    harness = sent(tensor)
    assert isinstance(harness, Tensor)
    back = sent(harness, torch=True)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_a_strided_tensor_and_an_empty_one_arrive() -> None:
    for tensor in (torch.arange(12).reshape(3, 4).t(), torch.zeros(0, 4), torch.tensor(3.0)):
        assert torch.equal(sent(tensor, torch=True), tensor)


def test_a_value_of_another_kind_is_refused_with_its_place() -> None:
    with pytest.raises(InputError, match=r"value\['a'\]\[1\].*object"):
        pack({}, {"a": [1, object()]})


def test_a_connection_carries_large_messages_and_ends_cleanly() -> None:
    ours, theirs = socket.socketpair()
    left, right = Connection(ours, torch=False), Connection(theirs, torch=False)
    array = np.random.default_rng(0).standard_normal(1 << 18)
    sender = threading.Thread(target=lambda: [left.send({"kind": "x"}, array) for _ in range(3)])
    sender.start()
    for _ in range(3):
        message = right.receive()
        assert message is not None
        assert np.array_equal(message["value"], array)
    sender.join()
    left.shutdown()
    assert right.receive() is None
    left.close()
    right.close()


@pytest.mark.parametrize("data", [b"\xff" * 64, LENGTHS.pack(4, 0) + b"nope", LENGTHS.pack(2, 0) + b"[]"])
def test_bytes_that_are_no_message_raise(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(data)
    theirs.close()
    connection = Connection(ours, torch=False)
    with pytest.raises((ValueError, TypeError, AttributeError)):
        connection.receive()
    connection.close()
