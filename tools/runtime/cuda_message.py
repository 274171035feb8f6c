"""What the two ends of a channel between devices share: torch's view of a device, and a message's descriptor."""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flashrt.clock import monotonic_ns
from flashrt.errors import Finding, ResourceMissingError
from flashrt.runtime.cuda_driver import HANDLE_BYTES, DriverError, Runtime, missing

POLL_S = 1e-3

Step = tuple[Callable[[int], None], int]


class TorchDevice:
    """What torch knows of one device; a subclass may stand in for it where there is none.

    Parameters
    ----------
    index
        As torch counts the devices that this process sees.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this the thread's current device; the one before comes back without a new context on it."""
        import torch

        with torch.cuda.device(self.index):
            yield

    def stream(self) -> int:
        """Return torch's current stream on this device."""
        import torch

        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def owns(self, tensor: Any) -> bool:
        """Return whether a tensor's memory is on this device."""
        return bool(tensor.is_cuda and tensor.device.index == self.index)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return an uninitialised tensor on this device, in the order of the current stream."""
        import torch

        return torch.empty(shape, dtype=dtype, device=f"cuda:{self.index}")

    def give_back_cache(self) -> None:
        """Return the memory that torch keeps for later to the device."""
        import torch

        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Place:
    """Where a message lies, and the events about it.

    Parameters
    ----------
    pool, pool_bytes, slot
        The exporter's number of the pool, what of it can be addressed, and the exporter's number of the slot.
    offset
        First byte of the message in the pool.
    memory, ready, done
        Handles: of the pool, of the event after the exporter's copy, and of each consumer's event after its copy.
    """

    pool: int
    pool_bytes: int
    slot: int
    offset: int
    memory: bytes
    ready: bytes
    done: tuple[bytes, ...]


@dataclass(frozen=True)
class Message:
    """One tensor on its way; the JSON form is the descriptor.

    Parameters
    ----------
    exporter
        Unique name of the exporter.
    pid, bus
        Its process, and its device's PCI bus id.
    dtype
        As torch calls it, without ``torch.``.
    place
        None for a tensor without elements.
    """

    exporter: str
    pid: int
    bus: str
    sequence: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    place: Place | None

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON-able descriptor."""
        place = self.place
        form = place and {
            **vars(place),
            "memory": _text(place.memory),
            "ready": _text(place.ready),
            "done": [_text(handle) for handle in place.done],
        }
        return {**vars(self), "shape": list(self.shape), "place": form}

    @classmethod
    def from_dict(cls, form: Mapping[str, Any]) -> Message:
        """Rebuild a message and check it: a wrong address would end this process's device context.

        Raises
        ------
        ValueError, KeyError, TypeError
            No descriptor, or one whose message leaves its pool.
        """
        import torch

        message = cls(
            exporter=str(form["exporter"]),
            pid=int(form["pid"]),
            bus=str(form["bus"]),
            sequence=int(form["sequence"]),
            dtype=str(form["dtype"]),
            shape=tuple(int(length) for length in form["shape"]),
            nbytes=int(form["nbytes"]),
            place=None if form["place"] is None else _place(form["place"]),
        )
        dtype = getattr(torch, message.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"no dtype '{message.dtype}'")
        if min(message.shape, default=0) < 0 or message.nbytes != math.prod(message.shape) * dtype.itemsize:
            raise ValueError(f"{message.nbytes} bytes for {message.dtype} {list(message.shape)}")
        place = message.place
        if (place is None) != (message.nbytes == 0):
            raise ValueError(f"{message.nbytes} bytes {'nowhere' if place is None else 'in a slot'}")
        if place is not None and not 0 <= place.offset <= place.pool_bytes - message.nbytes:
            raise ValueError(f"{message.nbytes} bytes at {place.offset} of a pool of {place.pool_bytes}")
        return message


def _place(form: Mapping[str, Any]) -> Place:
    return Place(
        pool=int(form["pool"]),
        pool_bytes=int(form["pool_bytes"]),
        slot=int(form["slot"]),
        offset=int(form["offset"]),
        memory=_handle(form["memory"]),
        ready=_handle(form["ready"]),
        done=tuple(_handle(text) for text in form["done"]),
    )


def _text(handle: bytes) -> str:
    return base64.b64encode(handle).decode()


def _handle(text: str) -> bytes:
    handle = base64.b64decode(text, validate=True)
    if len(handle) != HANDLE_BYTES:
        raise ValueError(f"a handle of {len(handle)} bytes")
    return handle


def await_all(runtime: Runtime, events: Iterable[int], timeout_s: float, where: str, peer: str) -> None:
    """Return once all events are complete; polls, because a wait in the library cannot be given up."""
    deadline_ns = monotonic_ns() + int(timeout_s * 1e9)
    waiting = list(events)
    while waiting := [event for event in waiting if not runtime.is_complete(event)]:
        if monotonic_ns() > deadline_ns:
            raise missing(
                where, f"copies that end within {timeout_s} s", f"{len(waiting)} that wait for {peer}",
                "end this process: only that frees what they use", rule="gpu-copy-pending",
            )  # fmt: skip
        time.sleep(POLL_S)


def do_all(steps: Iterable[Step]) -> None:
    """Do every step, also after one has failed; then raise all findings."""
    findings: list[Finding] = []
    for step, argument in steps:
        try:
            step(argument)
        except DriverError as error:
            findings += error.findings
    if findings:
        raise ResourceMissingError(findings)
