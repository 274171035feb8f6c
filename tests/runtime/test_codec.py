"""Values on a channel: whatever is sent arrives with its type, its shape and its bits, and what cannot be is named."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flashrt.errors import InputError
from flashrt.runtime.channels.codec import VALUE, Message, inline_bytes, place_arrays, put_together, take_apart
from flashrt.runtime.channels.hub import Transport
from flashrt.runtime.wire import BIT_TYPES, Tensor
from tests.runtime.ends import TRANSPORTS, opened, passed

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
SHAPES = st.lists(st.integers(0, 6), max_size=4) | st.lists(st.integers(10, 40), min_size=2, max_size=3)
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, -1) if tensor.ndim else tensor,
    "every second": lambda tensor: tensor[::2] if tensor.ndim else tensor,
    "without the first": lambda tensor: tensor[1:] if tensor.ndim else tensor,
    "expanded": lambda tensor: tensor.unsqueeze(0).expand(2, *tensor.shape),
    "channels last": lambda tensor: tensor.to(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor,
    "conjugate": lambda tensor: tensor.conj() if tensor.is_complex() else tensor,
    "negated": lambda tensor: tensor.conj().imag if tensor.is_complex() else tensor,
    "with gradient": lambda tensor: tensor.requires_grad_() if tensor.dtype is torch.float32 else tensor,
}


def bits(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of any bits at all, NaNs with payload among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


TENSORS = st.builds(
    lambda shape, dtype, seed, view: VIEWS[view](bits(shape, dtype, seed)),
    SHAPES, st.sampled_from(DTYPES), st.integers(0, 99), st.sampled_from(list(VIEWS)),
)  # fmt: skip
ARRAYS = hnp.arrays(
    hnp.floating_dtypes() | hnp.integer_dtypes() | hnp.boolean_dtypes() | hnp.complex_number_dtypes()
    | hnp.unicode_string_dtypes(max_len=3) | hnp.datetime64_dtypes(),
    hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
)  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=8) | st.binary(min_size=5000, max_size=5000) | hnp.from_dtype(np.dtype("float32"))
    | hnp.from_dtype(np.dtype("int16"))
)  # fmt: skip
KEYS = st.text(max_size=4) | st.integers() | st.booleans() | st.tuples(st.integers(), st.text(max_size=2))
VALUES = st.recursive(
    SCALARS | ARRAYS | TENSORS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=12,
)  # fmt: skip


def raw_bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's value as bytes, in order."""
    plain = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.detach().reshape(-1))
    return bytes(plain.view(torch.uint8).numpy().data) if plain.numel() else b""


def assert_identical(got: Any, want: Any, *, torch_side: bool = True) -> None:
    """Compare types, shapes and bits, at every depth."""
    if isinstance(want, torch.Tensor) and not torch_side:
        assert isinstance(got, Tensor)
        name = str(want.dtype).removeprefix("torch.")
        assert (got.dtype, got.shape) == (name, tuple(want.shape))
        assert got.data.dtype.name == BIT_TYPES.get(name, name)
        assert got.data.tobytes() == raw_bits(want)
        return
    assert type(got) is type(want)
    if isinstance(want, torch.Tensor):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert raw_bits(got) == raw_bits(want)
    elif isinstance(want, np.ndarray | np.generic):
        assert (got.dtype.str, got.shape) == (want.dtype.str, want.shape)
        assert got.tobytes() == want.tobytes()
    elif isinstance(want, float):
        assert got.hex() == want.hex()
    elif isinstance(want, dict):
        assert list(got) == list(want)
        assert [type(key) for key in got] == [type(key) for key in want]
        for key in want:
            assert_identical(got[key], want[key], torch_side=torch_side)
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_identical(one, other, torch_side=torch_side)
    else:
        assert got == want


def through_bytes(value: Any, *, torch_side: bool) -> Any:
    """Take a value apart, turn the message into bytes and back, and put it together."""
    encoded = take_apart(value, "value")
    places, size = place_arrays(encoded.arrays, {}, 0)
    block = bytearray(size)
    for (address, length), (number, offset) in zip(encoded.arrays, places, strict=True):
        if number == 0:
            block[offset : offset + length] = ctypes.string_at(address, length)
    inline = inline_bytes(encoded.arrays, places)
    message = Message(3, 2**60, -5, encoded.num_bytes, VALUE, False, places, encoded.form, inline)
    received = put_together(Message.unpack(message.pack()), lambda number: block, torch=torch_side)
    assert received[1:6] == (3, False, False, 2**60, -5)
    assert received.num_bytes == sum(length for _, length in encoded.arrays)
    return received.value


@pytest.mark.parametrize("torch_side", [True, False], ids=["to-torch", "to-numpy"])
@given(VALUES)
@settings(deadline=None)
def test_a_value_taken_apart_and_put_together_is_the_same(torch_side: bool, value: Any) -> None:
    assert_identical(through_bytes(value, torch_side=torch_side), value, torch_side=torch_side)


@pytest.mark.parametrize("torch_side", [True, False], ids=["to-torch", "to-numpy"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_value_sent_is_the_same_on_the_other_side(transport: Transport, torch_side: bool) -> None:
    # One pair of endpoints for all values: memory is used again and again.
    with opened(transport=transport, torch=torch_side) as ends:

        @given(VALUES)
        @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
        def sent(value: Any) -> None:
            assert_identical(passed(ends, value), value, torch_side=torch_side)

        sent()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_each_type_and_size_arrive(transport: Transport, dtype: torch.dtype) -> None:
    # Inside the message; copied out of it; one of several; where they are; and around the sizes at which that changes.
    shapes: list[list[int]] = [[], [0], [0, 3], [1], [7], [64], [512], [4096 // dtype.itemsize], [4097], [33, 7, 129]]
    with opened(transport=transport) as ends:
        for shape in [*shapes, [1 << 18]]:
            tensor = bits(shape, dtype, seed=len(shape))
            assert_identical(passed(ends, tensor), tensor)
            assert_identical(passed(ends, [tensor, {"again": tensor}, 1]), [tensor, {"again": tensor}, 1])


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    "value",
    [
        "é" * 5000,
        "\ud800 alone \0",
        list(range(2000)),
        [np.arange(index) for index in range(400)],
        {f"key {index}": torch.full((3,), index) for index in range(300)},
        [torch.zeros(0), np.zeros((0, 3)), b"", torch.ones(5000), np.zeros((4, 0))],
        [[[[[[[[[[b"deep"]]]]]]]]]],
        np.arange(6000, dtype=">i4"),
        np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
        [math.nan, -math.inf, -0.0, 5e-324, 2**64, -(2**63) - 1],
        [np.float64(1.5), np.bool_(True), np.datetime64("2026-01-01"), np.str_("word").reshape(1)],
        {1: "one", "1": "text", (1, 2): None, None: {}},
        [(), [], {}, (None,), True, 1, 1.0],
    ],
    ids=[
        "long-text", "odd-text", "long-list", "many-arrays", "many-tensors", "empties", "deep", "big-endian", "fortran",
        "numbers", "numpy-scalars", "keys", "look-alikes",
    ],
)  # fmt: skip
def test_odd_and_large_values_arrive(transport: Transport, value: Any) -> None:
    with opened(transport=transport) as ends:
        for _ in range(3):
            assert_identical(passed(ends, value), value)


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ({"a": [1, object()]}, r"port 'y'\['a'\]\[1\].*object"),
        (torch.zeros(3, device="meta"), "tensor of torch.float32 on meta"),
        (torch.eye(3).to_sparse(), "sparse_coo tensor"),
        (torch.zeros(3, dtype=torch.float8_e4m3fnuz), "float8_e4m3fnuz"),
        (np.array([object()]), "object"),
        (np.zeros(2, [("a", "i4")]), "NumPy array"),
        ({1, 2}, "set"),
        (3j, "complex"),
    ],
    ids=["deep", "meta", "sparse", "float8-variant", "objects", "records", "set", "j"],
)
def test_a_value_that_cannot_be_carried_is_named_and_nothing_of_it_is_sent(value: Any, got: str) -> None:
    with opened() as ends:
        where = "operation 'p', port 'y'"
        with pytest.raises(InputError, match=f"operation 'p'.*{got}") as caught:
            ends["a"].send(0, value, 0, where=where)
        assert caught.value.findings[0].rule == "value-kind"
        assert ends["b"].poll(0) is None
        assert passed(ends, [1, "after"]) == [1, "after"]


def test_the_heads_of_messages_are_as_they_were_sent() -> None:
    with opened() as ends:
        ends["a"].send(0, torch.ones(2000), 7, last=False, ready_ns=2**62)
        ends["a"].send_end(0, 8, ready_ns=5)
        first, second = ends["b"].poll(0), ends["b"].poll(0)
        assert first is not None
        assert second is not None
        assert (first.batch, first.last, first.is_end, first.ready_ns) == (7, False, False, 2**62)
        assert first.num_bytes == 8000
        assert [id(tensor) for tensor in first.tensors] == [id(first.value)]
        assert (second.value, second.batch, second.last, second.is_end) == (None, 8, True, True)
        assert second.ready_ns == 5
        assert second.sent_ns >= first.sent_ns > 0


def test_every_tensor_in_a_value_is_listed_for_the_check_of_writes() -> None:
    value = [torch.ones(3), {"b": (torch.ones(9000), 1)}, np.ones(3), torch.tensor(1)]
    with opened() as ends:
        ends["a"].send(0, value, 0)
        received = ends["b"].poll(0)
        assert received is not None
        shown = [received.value[0], received.value[1]["b"][0], received.value[3]]
        assert [id(tensor) for tensor in received.tensors] == [id(tensor) for tensor in shown]


def test_floats_keep_every_bit_but_the_payload_of_a_nan() -> None:
    with opened() as ends:
        for number in (0.1, -0.0, 5e-324, math.inf, 1.7976931348623157e308):
            got = passed(ends, number)
            assert struct.pack("<d", got) == struct.pack("<d", number)
