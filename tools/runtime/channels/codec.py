"""From a value to what a channel carries and back: a form (JSON) and arrays in blocks of shared memory.

A tensor that was loaned from the channel is already where its reader finds it; any other array is copied there once.
The path of a message that is one plain tensor is short: a hand-over has to be no slower than waking its reader.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from flashrt.errors import input_error
from flashrt.ir.values import is_tensor
from flashrt.runtime.wire import DeviceDecode, DeviceEncode, Tensor, decode, encode

HEAD = struct.Struct("<qqqqBBII")
"""Batch, ready (ns), sent (ns), bytes of all arrays, kind, last, number of arrays, length of the form."""
PLACE = struct.Struct("<qQ")
"""Block in the message's list (-1: inline), offset in it."""
INLINE_BYTES = 512
ALIGNMENT = 64
MAX_KEPT_FORM_BYTES, MAX_KEPT_FORMS = 512, 1024
SMALL_BYTES = 4096
"""An array this small inside a larger value is copied, so that keeping it keeps no block."""
VALUE, END = 0, 1
Place = tuple[int, int]
Array = tuple[int, int]
"""(address, bytes)."""


class Received(NamedTuple):
    """One message of a channel."""

    value: Any
    """A chunk, or a whole value; None for an end marker."""
    batch: int
    last: bool
    """Whether no more of this batch come."""
    is_end: bool
    """Whether it only says that the batch has ended with fewer chunks than declared."""
    ready_ns: int
    """Emulated devices: when the value is there, transfer included, on the emulated clock; 0 otherwise."""
    sent_ns: int
    num_bytes: int
    """Size of its arrays."""
    tensors: tuple[Any, ...]
    """Torch tensors in the value; their memory may be shared."""


class Message(NamedTuple):
    """What a carrier moves beside the blocks."""

    batch: int
    ready_ns: int
    sent_ns: int
    num_bytes: int
    kind: int
    last: bool
    places: Sequence[Place]
    """Block in the message's list (-1: inline) and offset, of each array."""
    form: bytes
    inline: bytes
    """The bytes of inline arrays."""

    def pack(self) -> bytes:
        """Return the message as bytes."""
        head = HEAD.pack(*self[:6], len(self.places), len(self.form))
        return b"".join((head, *(PLACE.pack(*place) for place in self.places), self.form, self.inline))

    @staticmethod
    def unpack(data: bytes) -> Message:
        """Return the message that `pack` described."""
        batch, ready_ns, sent_ns, num_bytes, kind, last, num_arrays, form_length = HEAD.unpack_from(data)
        at = HEAD.size + num_arrays * PLACE.size
        places: list[Any] = list(PLACE.iter_unpack(data[HEAD.size : at]))
        end = at + form_length
        return Message(batch, ready_ns, sent_ns, num_bytes, kind, bool(last), places, data[at:end], data[end:])


class Encoded(NamedTuple):
    """A value taken apart: its form and its arrays, in the form's order."""

    form: bytes
    arrays: Sequence[Array]
    num_bytes: int
    keep: Any
    """What holds the memory of the arrays."""


END_MARK = Encoded(b"null", (), 0, None)
_tensor_forms: dict[tuple[Any, Any], bytes] = {}


def take_apart(value: Any, where: str, on_device: DeviceEncode | None = None) -> Encoded:
    """Return the form and the arrays of a value.

    Raises
    ------
    InputError
        A value of a kind that channels do not carry; names the place inside `value`.
    """
    torch = sys.modules.get("torch")
    if torch is not None and type(value) is torch.Tensor and is_plain(value):
        key = (value.dtype, value.shape)
        form = _tensor_forms.get(key)
        if form is None:
            form = json.dumps(encode(value, [], where), separators=(",", ":")).encode()
            if len(_tensor_forms) < MAX_KEPT_FORMS:
                _tensor_forms[key] = form
        size = value.nbytes
        return Encoded(form, ((value.data_ptr(), size),), size, value)
    buffers: list[memoryview | bytes] = []
    try:
        text = json.dumps(encode(value, buffers, where, on_device), separators=(",", ":"))
    except (RecursionError, ValueError) as error:
        raise input_error(
            where, "a value that can be written down: nested less than 200 deep, not inside itself, integers below "
            "4,000 digits", f"{type(error).__name__}: {str(error)[:200]}", "make it flatter and call again",
            rule="value-kind",
        ) from error  # fmt: skip
    arrays = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    return Encoded(
        text.encode(), [(array.ctypes.data, array.nbytes) for array in arrays], sum(map(len, buffers)), arrays
    )


def is_plain(tensor: Any) -> bool:
    """Return whether a tensor's memory is its value: on the host, dense, in order, nothing left to compute."""
    torch = sys.modules["torch"]
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    dtype = tensor.dtype
    real = dtype.is_floating_point or dtype is torch.uint8 or (not dtype.is_complex and not tensor.is_quantized)
    return real and tensor.is_contiguous() and not tensor.is_neg()


def place_arrays(arrays: Sequence[Array], loaned: dict[int, Place], num_loans: int) -> tuple[list[Place], int]:
    """Return the place of each array and the size of the block for those that are copied (0: none is needed).

    Parameters
    ----------
    loaned
        Array -> its place, for arrays that lie in one of the first `num_loans` blocks; the block for the rest comes
        after these.
    """
    copied = sum(size for index, (_, size) in enumerate(arrays) if index not in loaned)
    block = -1 if copied <= INLINE_BYTES else num_loans
    places, end = [], 0
    for index, (_, size) in enumerate(arrays):
        if index in loaned:
            places.append(loaned[index])
            continue
        places.append((block, end))
        end += size if block < 0 else -(-size // ALIGNMENT) * ALIGNMENT
    return places, end if block >= 0 else 0


def inline_bytes(arrays: Sequence[Array], places: Sequence[Place]) -> bytes:
    """Return the bytes of the arrays that travel inside the message itself."""
    pairs = zip(arrays, places, strict=True)
    return b"".join(ctypes.string_at(address, size) for (address, size), (block, _) in pairs if block < 0 and size)


class _Blocks:
    """The arrays of one message as `decode` takes them, in order."""

    def __init__(self, message: Message, borrow: Callable[[int], Any]) -> None:
        self._places = iter(message.places)
        self._inline = message.inline
        self._borrow = borrow

    def take(self, size: int) -> memoryview:
        """Return the next array's bytes: small ones as a copy, large ones where they are."""
        block, offset = next(self._places)
        if block < 0:
            return memoryview(bytearray(self._inline[offset : offset + size]))
        data = memoryview(self._borrow(block)).cast("B")[offset : offset + size]
        return memoryview(bytearray(data)) if size <= SMALL_BYTES else data

    def array(self, data: memoryview, dtype: str, shape: Sequence[int]) -> np.ndarray:
        """Return an array over `data`."""
        return np.frombuffer(data, dtype).reshape(shape)


@lru_cache(maxsize=MAX_KEPT_FORMS)
def _parsed_small(form: bytes) -> Any:
    return json.loads(form)


def _parsed(form: bytes) -> Any:
    """Return a form; what is decoded from it makes new objects, so small ones are kept."""
    return _parsed_small(form) if len(form) <= MAX_KEPT_FORM_BYTES else json.loads(form)


Plain = tuple[Callable[..., Any], Any, int, Sequence[int] | None]
_plain_forms: dict[bytes, Plain | None] = {}


def plain_tensor(form: bytes) -> Plain | None:
    """Return how to make the tensor of a form that is one tensor, not empty; None for any other.

    Returns
    -------
    (``torch.frombuffer``, dtype, number of elements, shape or None where there is one axis).
    """
    try:
        return _plain_forms[form]
    except KeyError:
        found = _find_plain(form) if len(form) <= MAX_KEPT_FORM_BYTES else None
        if len(_plain_forms) < MAX_KEPT_FORMS and len(form) <= MAX_KEPT_FORM_BYTES:
            _plain_forms[form] = found
        return found


def _find_plain(form: bytes) -> Plain | None:
    parsed = _parsed(form)
    if not isinstance(parsed, dict) or "t" not in parsed or not parsed["n"]:
        return None
    import torch

    dtype, shape = getattr(torch, parsed["t"]), parsed["s"]
    return torch.frombuffer, dtype, parsed["n"] // dtype.itemsize, shape if len(shape) != 1 else None


def put_together(
    message: Message, borrow: Callable[[int], Any], *, torch: bool, on_device: DeviceDecode | None = None
) -> Received:
    """Return what a message says.

    Parameters
    ----------
    borrow
        Block of the message's list -> an object with the buffer protocol over its bytes.
    torch
        Whether tensors become torch tensors, or `flashrt.runtime.wire.Tensor`.
    """
    batch, ready_ns, sent_ns, num_bytes, kind, last, places, form, _ = message
    if kind == END:
        return Received(None, batch, bool(last), True, ready_ns, sent_ns, 0, ())
    plain = plain_tensor(form) if torch else None
    if plain is not None and places[0][0] >= 0:
        from_buffer, dtype, count, shape = plain
        block, offset = places[0]
        tensor = from_buffer(borrow(block), dtype=dtype, count=count, offset=offset)
        if shape is not None:
            tensor = tensor.view(shape)
        return Received(tensor, batch, bool(last), False, ready_ns, sent_ns, num_bytes, (tensor,))
    value = decode(_parsed(form), _Blocks(message, borrow), torch=torch, on_device=on_device)
    tensors = tuple(_found_tensors(value))
    return Received(value, batch, bool(last), False, ready_ns, sent_ns, num_bytes, tensors)


def _found_tensors(value: Any) -> list[Any]:
    """Return the torch tensors inside a value; arrays become read-only, since others may read the same memory."""
    if is_tensor(value):
        return [value]
    if isinstance(value, np.ndarray | Tensor):
        (value.data if isinstance(value, Tensor) else value).flags.writeable = False
        return []
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _found_tensors(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _found_tensors(item)]
    return []
