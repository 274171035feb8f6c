"""The receiving end of channels between devices: handles are opened once, tensors are copied out of their slots."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flashrt.errors import input_error
from flashrt.runtime.cuda_driver import INVALID_CONTEXT, PEER_UNSUPPORTED, DriverError, Runtime, missing
from flashrt.runtime.cuda_message import Message, Place, Step, TorchDevice, await_all, do_all


class CudaImporter:
    """The receiving end of channels: descriptors go in, tensors of this process's own come out.

    Handles are opened once and kept until `close`. The device may be the exporter's or another one that can read it.
    Safe from several threads.

    Parameters
    ----------
    runtime
        The library.
    device_index
        The device on which tensors come out, as torch counts.
    consumer
        Which of the exporter's consumers this is.
    name
        The channel, as errors call it.
    device
        What stands in for torch's device.
    """

    def __init__(
        self,
        runtime: Runtime,
        device_index: int,
        *,
        consumer: int = 0,
        name: str = "channel",
        device: TorchDevice | None = None,
    ) -> None:
        self._runtime = runtime
        self._device = device or TorchDevice(device_index)
        self._bus = runtime.bus_of(device_index)
        self._where = f"{runtime.vendor.kind} channel '{name}', device {device_index} ({self._bus})"
        self._consumer = consumer
        self._lock = threading.Lock()
        self._memory: dict[tuple[str, int], int] = {}
        self._events: dict[tuple[str, int, str], tuple[bytes, int]] = {}
        self._copies: set[int] = set()
        self._pids: set[int] = set()
        self._closed = False

    def open(self, descriptor: Mapping[str, Any]) -> Any:
        """Return a message's tensor in memory of its own, ready in the order of torch's current stream.

        The message can be released as soon as this has returned.

        Raises
        ------
        InputError
            No descriptor of a message, or a device whose memory this one cannot read; names both.
        ResourceMissingError
            The exporter's process is gone, or there is no memory for the tensor.
        """
        message = self._read(descriptor)
        with self._lock, self._device.active():
            if self._closed:
                raise input_error(self._where, "an open channel", "open after close", "start the run again")
            tensor = self._empty(message)
            place = message.place
            if place is None:
                return tensor
            base = self._opened_memory(message, place)
            ready = self._opened_event(message, (message.exporter, place.slot, "ready"), place.ready)
            done = self._opened_event(message, (message.exporter, place.slot, "done"), place.done[self._consumer])
            stream = self._device.stream()
            self._runtime.stream_wait(stream, ready)
            self._runtime.copy(tensor.data_ptr(), base + place.offset, message.nbytes, stream)
            self._runtime.record(done, stream)
            self._copies.add(done)
            return tensor

    def is_idle(self) -> bool:
        """Return whether the copies of all messages opened so far are complete."""
        with self._lock, self._device.active():
            return all(self._runtime.is_complete(event) for event in self._copies)

    def close(self, timeout_s: float = 5.0) -> None:
        """Close all handles, once the copies are complete; the tensors stay. A second call does nothing.

        Parameters
        ----------
        timeout_s
            How long to wait for copies: one that waits for an exporter that is gone never ends.

        Raises
        ------
        ResourceMissingError
            A copy did not end in time, so the handles stay open (the end of this process closes them); or the library
            refused.
        """
        with self._lock:
            if self._closed:
                return
            with self._device.active():
                gone = [f"{pid} (which has ended)" if _has_ended(pid) else str(pid) for pid in sorted(self._pids)]
                await_all(
                    self._runtime, self._copies, timeout_s, self._where, f"the exporter, process {', '.join(gone)}"
                )
                self._closed = True
                steps: list[Step] = [(self._runtime.destroy_event, event) for _, event in self._events.values()]
                steps += [(self._runtime.close_memory, address) for address in self._memory.values()]
                self._copies.clear()
                self._events.clear()
                self._memory.clear()
                do_all(steps)

    def _read(self, descriptor: Mapping[str, Any]) -> Message:
        try:
            message = Message.from_dict(descriptor)
            if message.place is not None and not 0 <= self._consumer < len(message.place.done):
                raise ValueError(f"a message for {len(message.place.done)} consumers")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise input_error(
                self._where, f"the descriptor of a message for consumer {self._consumer}",
                f"{type(error).__name__}: {error}", "pass on what CudaExporter.share returned, unchanged",
                rule="gpu-descriptor",
            ) from error  # fmt: skip
        return message

    def _empty(self, message: Message) -> Any:
        import torch

        try:
            return self._device.empty(message.shape, getattr(torch, message.dtype))
        except torch.OutOfMemoryError as error:
            raise missing(
                self._where, f"{message.nbytes} bytes of device memory for message {message.sequence}",
                " ".join(str(error).split())[:200],
                "see who holds the memory with gpu_status, send smaller chunks, and start the run again",
                rule="gpu-memory",
            ) from error  # fmt: skip

    def _opened_memory(self, message: Message, place: Place) -> int:
        key = message.exporter, place.pool
        if key not in self._memory:
            # A device that this process does not see can still be mapped, so only one that it sees is asked about.
            theirs = self._runtime.device_at(message.bus)
            ours = self._device.index
            if theirs is not None and theirs != ours and not self._runtime.can_access_peer(ours, theirs):
                raise self._no_peer(message, "the driver offers no peer access between them")
            self._memory[key] = self._opened(message, self._runtime.open_memory, place.memory)
        return self._memory[key]

    def _opened_event(self, message: Message, key: tuple[str, int, str], handle: bytes) -> int:
        known = self._events.get(key)
        if known is not None and known[0] == handle:
            return known[1]
        event = self._opened(message, self._runtime.open_event, handle)
        self._events[key] = handle, event
        if known is not None:
            # The exporter renewed it (see `Vendor.records_per_event`) after this end's wait for it was over.
            self._runtime.destroy_event(known[1])
        return event

    def _opened(self, message: Message, call: Callable[[bytes], int], handle: bytes) -> int:
        self._pids.add(message.pid)
        try:
            return call(handle)
        except DriverError as error:
            if error.code == PEER_UNSUPPORTED:
                raise self._no_peer(message, error.words) from error
            sender = f"process {message.pid}, which exported it"
            if error.code == INVALID_CONTEXT and message.pid == os.getpid():
                got, fix = f"{error.words} in the exporting process itself", "use hand_over within a process"
            else:
                got = f"{error.words}; {sender}, {'has ended' if _has_ended(message.pid) else 'is running'}"
                fix = "read that process's log, and start the run again"
            expected = f"a handle of message {message.sequence} that can be opened"
            raise missing(self._where, expected, got, fix, rule="gpu-handle") from error

    def _no_peer(self, message: Message, got: str) -> Exception:
        return input_error(
            self._where, f"a device that can read device {message.bus}", f"device {self._bus}: {got}",
            "place both ends on one device or in one island of gpu_status, or let the edge go through host memory",
            rule="gpu-peer",
        )  # fmt: skip


def _has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()
