"""Values and messages on the wire between the harness and a system under test.

A message is a JSON head and the raw bytes of its arrays. Nothing is pickled: what comes from a system under test
is data, never code. The harness side needs no torch; a tensor is a `Tensor` there.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, Protocol

import numpy as np

from flashrt.clock import monotonic_ns
from flashrt.errors import input_error
from flashrt.ir.values import is_array, is_tensor

LENGTHS = struct.Struct("<IQ")
MAX_HEAD_BYTES = 64 << 20
MAX_BODY_BYTES = 8 << 30
SMALL_BYTES = 1 << 16
# NumPy has no such types; their bits travel in an integer type of the same width.
DeviceEncode = Callable[[Any], dict[str, Any]]
DeviceDecode = Callable[[Mapping[str, Any]], Any]
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


class Source(Protocol):
    """Where the bytes of a value's arrays come from when it is decoded, in the order in which they were encoded."""

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes."""

    def array(self, data: memoryview, dtype: str, shape: Sequence[int]) -> np.ndarray:
        """Return an array over `data`, or over a copy of it."""


EXACT_ARRAYS = (np.ndarray, np.memmap)


def encode(
    value: Any, buffers: list[memoryview | bytes], where: str = "value", on_device: DeviceEncode | None = None
) -> Any:
    """Return the JSON form of `value`; array bytes are appended to `buffers`.

    Parameters
    ----------
    on_device
        Called for a tensor that is not in host memory; returns what describes it. Without it, the tensor is copied.

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
        if on_device is not None and value.device.type != "cpu":
            return {"c": on_device(value)}
        return _encode_tensor(value, buffers, where)
    if is_array(value) or isinstance(value, np.generic):
        array = np.asarray(value)
        if is_array(value) and type(value) not in EXACT_ARRAYS:
            # Others work unlike an array, or would do their work after the clock stopped.
            raise _unknown(where, f"a {type(value).__name__}, which is no NumPy array itself but a subclass")
        if array.dtype.hasobject or array.dtype.names:
            raise _unknown(where, f"NumPy array of {array.dtype}")
        return _encode_array("a" if is_array(value) else "g", array.dtype.str, array, buffers)
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        buffers.append(data)
        return {"b": len(data)}
    if isinstance(value, list | tuple):
        kind = "l" if isinstance(value, list) else "u"
        return {kind: [encode(item, buffers, f"{where}[{index}]", on_device) for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        pairs = [
            [encode(k, buffers, where), encode(v, buffers, f"{where}[{k!r}]", on_device)] for k, v in value.items()
        ]
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


def _encode_tensor(value: Any, buffers: list[memoryview | bytes], where: str) -> dict[str, Any]:
    import torch

    try:
        # An exact tensor with real storage: a lazy subclass would do its work after the clock stopped.
        plain = value.detach().as_subclass(torch.Tensor).to("cpu").resolve_conj().resolve_neg().contiguous()
        dtype = str(plain.dtype).removeprefix("torch.")
        bits = BIT_TYPES.get(dtype)
        data = plain.view(getattr(torch, bits)).numpy() if bits else plain.numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        got = f"{value.layout} tensor of {value.dtype} on {value.device}: {' '.join(str(error).split())[:200]}"
        raise _unknown(where, got) from error
    return _encode_array("t", dtype, data, buffers)


def decode(form: Any, source: Source, *, torch: bool, on_device: DeviceDecode | None = None) -> Any:
    """Rebuild a value from its JSON form and the bytes of its arrays.

    Parameters
    ----------
    torch
        Whether tensors become torch tensors (in a system's process) or `Tensor` (in the harness).
    on_device
        Opens what `encode`'s hook of the same name described.
    """
    if form is None or isinstance(form, bool | str | int):
        return form
    if "f" in form:
        return float.fromhex(form["f"])
    if "b" in form:
        return bytes(source.take(form["b"]))
    if "l" in form:
        return [decode(item, source, torch=torch, on_device=on_device) for item in form["l"]]
    if "u" in form:
        return tuple(decode(item, source, torch=torch, on_device=on_device) for item in form["u"])
    if "d" in form:
        pairs = [
            [decode(part, source, torch=torch, on_device=on_device) for part in (key, item)] for key, item in form["d"]
        ]
        return dict(pairs)
    if "c" in form:
        if on_device is None:
            raise ValueError("a tensor on a device, and no device here")
        return on_device(form["c"])
    data = source.take(form["n"])
    if "t" in form:
        array = source.array(data, BIT_TYPES.get(form["t"], form["t"]), form["s"])
        return _to_torch(form["t"], array) if torch else Tensor(form["t"], array)
    array = source.array(data, form["a"] if "a" in form else form["g"], form["s"])
    return array if "a" in form else array[()]


class _Body:
    """The bytes after a message's head."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    def take(self, size: int) -> memoryview:
        start = self._at
        self._at = start + size
        if size < 0 or self._at > len(self._body):
            raise ValueError(f"array of {size} bytes at {start} leaves a body of {len(self._body)}")
        return self._body[start : self._at]

    def array(self, data: memoryview, dtype: str, shape: Sequence[int]) -> np.ndarray:
        array = np.frombuffer(data, dtype).reshape(shape)
        # The bulk of a message keeps the message's own memory; a small part must not hold on to all of it.
        if array.flags.aligned and array.flags.writeable and 2 * len(data) > len(self._body):
            return array
        return array.copy()


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


def unpack(text: bytes | memoryview, body: bytes | memoryview, *, torch: bool) -> dict[str, Any]:
    """Return the message: its head's keys and, under ``value``, the value.

    Raises
    ------
    ValueError
        The bytes are no message.
    """
    try:
        head: dict[str, Any] = json.loads(bytes(text))
        head["value"] = decode(head.get("value"), _Body(memoryview(body)), torch=torch)
    except (TypeError, AttributeError, KeyError, RecursionError, OverflowError, MemoryError) as error:
        raise ValueError(f"no message: {type(error).__name__}: {error}") from error
    return head


class Connection:
    """Messages over a stream socket; sending is safe from several threads, receiving belongs to one.

    Attributes
    ----------
    torch
        Whether received tensors become torch tensors, or `Tensor`.
    received_ns
        When the last received message was complete, before it was decoded.
    on_receive, on_close
        Called with each message that `receive` returns, and when it finds the other side gone.
    """

    def __init__(self, stream: socket.socket, *, torch: bool) -> None:
        self._socket = stream
        self.torch = torch
        self._lock = threading.Lock()
        self._buffer = bytearray(SMALL_BYTES)
        self._at = self._filled = 0
        self._broken = False
        self.received_ns = 0
        self.on_receive: Callable[[], None] = lambda: None
        self.on_close: Callable[[], None] = lambda: None

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait on."""
        return self._socket.fileno()

    @property
    def num_buffered(self) -> int:
        """Bytes that have been read from the socket and belong to messages not received yet."""
        return self._filled - self._at

    def send(self, head: Mapping[str, Any], value: Any = None, where: str = "value") -> None:
        """Write one message, whole.

        Raises
        ------
        OSError
            The other side is gone, or takes nothing for as long as the socket's send time-out allows.
        """
        self.send_packed(pack(head, value, where))

    def send_packed(self, buffers: Sequence[memoryview | bytes]) -> None:
        """Write a message that `pack` made."""
        with self._lock:
            if self._broken:
                raise BrokenPipeError("an earlier message could not be written whole")
            try:
                if sum(len(buffer) for buffer in buffers) <= SMALL_BYTES:
                    self._socket.sendall(b"".join(buffers))
                    return
                self._socket.sendall(b"".join(buffers[:2]))
                for buffer in buffers[2:]:
                    self._socket.sendall(buffer)
            except BaseException:
                # The rest of a message that was cut would be read as the start of the next.
                self._broken = True
                raise

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, or None when the other side has closed.

        Raises
        ------
        ValueError
            The bytes are no message.
        """
        message = self._receive()
        (self.on_close if message is None else self.on_receive)()
        return message

    def _receive(self) -> dict[str, Any] | None:
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
        self.received_ns = monotonic_ns()
        return unpack(text, body, torch=self.torch)

    def _read(self, size: int) -> memoryview | None:
        """Return `size` bytes; small messages come out of one call to the kernel, large ones go straight in place."""
        # Not a bytearray: that would be written twice, first with zeros.
        view = data = np.empty(size, np.uint8).data
        while view:
            ready = min(self._filled - self._at, len(view))
            if ready:
                view[:ready] = memoryview(self._buffer)[self._at : self._at + ready]
                self._at += ready
                view = view[ready:]
                continue
            direct = len(view) >= SMALL_BYTES
            try:
                count = self._socket.recv_into(view if direct else self._buffer)
            except ConnectionResetError:
                return None
            if count == 0:
                return None
            if direct:
                view = view[count:]
            else:
                self._at, self._filled = 0, count
        return data

    def stop_reading(self) -> None:
        """Let `receive` return what has been sent already, then None; for when the other side is known to be gone.

        The other side's socket may live on in a process that it forked.
        """
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def shutdown(self) -> None:
        """Wake a blocked `receive` and end the connection."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

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
