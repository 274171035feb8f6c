"""Values and messages on the wire between the harness and a system under test.

A message is a JSON head and the raw bytes of its arrays. Nothing is pickled: what comes from a system under test
is data, never code. The harness side needs no torch; a tensor is a `Tensor` there.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from flashrt.errors import input_error
from flashrt.ir.values import is_array, is_tensor

LENGTHS = struct.Struct("<IQ")
MAX_HEAD_BYTES = 64 << 20
MAX_BODY_BYTES = 8 << 30
# NumPy has no such types; their bits travel in an integer type of the same width.
BIT_TYPES = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}


@dataclass(frozen=True, eq=False)
class Tensor:
    """A torch tensor as the harness sees it: its dtype's name and its data.

    `data` holds the bits as integers where NumPy has no such type (see `BIT_TYPES`).
    """

    dtype: str
    data: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis lengths."""
        return self.data.shape

    def as_float(self) -> np.ndarray:
        """Return the values in a NumPy type: bfloat16 widened to float32, others as they are."""
        if self.dtype == "bfloat16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        return self.data


def encode(value: Any, buffers: list[memoryview | bytes], where: str = "value") -> Any:
    """Return the JSON form of `value`; array bytes are appended to `buffers`.

    Raises
    ------
    InputError
        A value of a kind that systems cannot exchange; names the place inside `value`.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float) and not isinstance(value, np.generic):
        return value if isinstance(value, int) else {"f": value.hex()}
    if isinstance(value, Tensor):
        return _encode_array("t", value.dtype, value.data, buffers)
    if is_tensor(value):
        return _encode_tensor(value, buffers)
    if is_array(value) or isinstance(value, np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise _unknown(where, f"NumPy array of {array.dtype}")
        return _encode_array("a" if is_array(value) else "g", array.dtype.str, array, buffers)
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        buffers.append(data)
        return {"b": len(data)}
    if isinstance(value, list | tuple):
        kind = "l" if isinstance(value, list) else "u"
        return {kind: [encode(item, buffers, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = [[encode(k, buffers, where), encode(v, buffers, f"{where}[{k!r}]")] for k, v in value.items()]
        return {"d": pairs}
    raise _unknown(where, type(value).__name__)


def _unknown(where: str, got: str) -> Exception:
    return input_error(
        where, "tensors, NumPy arrays, str, bytes, numbers, and lists and dicts of them", got,
        "convert it before writing", rule="value-kind",
    )  # fmt: skip


def _encode_array(kind: str, dtype: str, array: np.ndarray, buffers: list[memoryview | bytes]) -> dict[str, Any]:
    data = np.ascontiguousarray(array)
    buffers.append(data.reshape(-1).view(np.uint8).data if data.nbytes else b"")
    return {kind: dtype, "s": list(array.shape), "n": data.nbytes}


def _encode_tensor(value: Any, buffers: list[memoryview | bytes]) -> dict[str, Any]:
    import torch

    # An exact tensor with real storage: a lazy subclass would do its work after the clock stopped.
    plain = value.detach().as_subclass(torch.Tensor).to("cpu").contiguous()
    dtype = str(plain.dtype).removeprefix("torch.")
    bits = BIT_TYPES.get(dtype)
    data = plain.view(getattr(torch, bits)).numpy() if bits else plain.numpy()
    return _encode_array("t", dtype, data, buffers)


def decode(form: Any, body: memoryview, *, torch: bool, _at: list[int] | None = None) -> Any:
    """Rebuild a value from its JSON form and the bytes of its arrays.

    Parameters
    ----------
    torch
        Whether tensors become torch tensors (in a system's process) or `Tensor` (in the harness).
    """
    at = [0] if _at is None else _at
    if form is None or isinstance(form, bool | str | int):
        return form
    if "f" in form:
        return float.fromhex(form["f"])
    if "b" in form:
        return bytes(_take(body, at, form["b"]))
    if "l" in form:
        return [decode(item, body, torch=torch, _at=at) for item in form["l"]]
    if "u" in form:
        return tuple(decode(item, body, torch=torch, _at=at) for item in form["u"])
    if "d" in form:
        return {
            decode(key, body, torch=torch, _at=at): decode(item, body, torch=torch, _at=at) for key, item in form["d"]
        }
    data = _take(body, at, form["n"])
    if "t" in form:
        array = np.frombuffer(data, BIT_TYPES.get(form["t"], form["t"])).reshape(form["s"]).copy()
        return _to_torch(form["t"], array) if torch else Tensor(form["t"], array)
    array = np.frombuffer(data, form["a"] if "a" in form else form["g"]).reshape(form["s"]).copy()
    return array if "a" in form else array[()]


def _take(body: memoryview, at: list[int], size: int) -> memoryview:
    start = at[0]
    at[0] = start + size
    if size < 0 or at[0] > len(body):
        raise ValueError(f"array of {size} bytes at {start} leaves a body of {len(body)}")
    return body[start : at[0]]


def _to_torch(dtype: str, array: np.ndarray) -> Any:
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(getattr(torch, dtype)) if dtype in BIT_TYPES else tensor


def pack(head: Mapping[str, Any], value: Any = None, where: str = "value") -> list[memoryview | bytes]:
    """Return a message as the buffers to write, in order."""
    buffers: list[memoryview | bytes] = []
    form = encode(value, buffers, where)
    text = json.dumps({**head, "value": form}, separators=(",", ":")).encode()
    return [LENGTHS.pack(len(text), sum(len(buffer) for buffer in buffers)), text, *buffers]


def unpack(text: bytes, body: bytearray | bytes, *, torch: bool) -> dict[str, Any]:
    """Return the message: its head's keys and, under ``value``, the value."""
    head: dict[str, Any] = json.loads(text)
    head["value"] = decode(head.get("value"), memoryview(body), torch=torch)
    return head


class Connection:
    """Messages over a stream socket; sending is safe from several threads, receiving belongs to one."""

    def __init__(self, stream: socket.socket, *, torch: bool) -> None:
        self._socket = stream
        self._torch = torch
        self._lock = threading.Lock()

    def send(self, head: Mapping[str, Any], value: Any = None, where: str = "value") -> None:
        """Write one message, whole.

        Raises
        ------
        BrokenPipeError, ConnectionResetError
            The other side is gone.
        """
        self.send_packed(pack(head, value, where))

    def send_packed(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Write a message that `pack` made."""
        with self._lock:
            if sum(len(buffer) for buffer in buffers) <= 1 << 16:
                self._socket.sendall(b"".join(buffers))
                return
            for buffer in buffers:
                self._socket.sendall(buffer)

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, or None when the other side has closed.

        Raises
        ------
        ValueError
            The bytes are no message.
        """
        lengths = self._read(LENGTHS.size)
        if lengths is None:
            return None
        head_bytes, body_bytes = LENGTHS.unpack(lengths)
        if head_bytes > MAX_HEAD_BYTES or body_bytes > MAX_BODY_BYTES:
            raise ValueError(f"a message of {head_bytes} + {body_bytes} bytes")
        text = self._read(head_bytes)
        body = self._read(body_bytes)
        if text is None or body is None:
            return None
        return unpack(bytes(text), body, torch=self._torch)

    def _read(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except ConnectionResetError:
                return None
            if count == 0:
                return None
            view = view[count:]
        return data

    def shutdown(self) -> None:
        """Wake a blocked `receive` and end the connection."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Release the socket."""
        self._socket.close()


def write_message(file: IO[bytes], head: Mapping[str, Any], value: Any) -> None:
    """Append one message to a recording."""
    for buffer in pack(head, value):
        file.write(buffer)


def read_messages(file: IO[bytes], *, torch: bool) -> list[dict[str, Any]]:
    """Return all messages of a recording.

    Raises
    ------
    ValueError
        The file ends inside a message.
    """
    found = []
    while lengths := file.read(LENGTHS.size):
        if len(lengths) < LENGTHS.size:
            raise ValueError("the file ends inside a message")
        head_bytes, body_bytes = LENGTHS.unpack(lengths)
        text, body = file.read(head_bytes), file.read(body_bytes)
        if len(text) < head_bytes or len(body) < body_bytes:
            raise ValueError("the file ends inside a message")
        found.append(unpack(text, body, torch=torch))
    return found
