"""The sending end of a channel between devices: tensors are copied into slots of pools."""

from __future__ import annotations

import os
import threading
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Any

from flashrt.errors import input_error
from flashrt.runtime.cuda_driver import OUT_OF_MEMORY, DriverError, Runtime, missing
from flashrt.runtime.cuda_message import Message, Place, Step, TorchDevice, await_all, do_all

# The library cuts smaller allocations out of blocks of 2 MiB, and a handle opens the whole block.
BLOCK_BYTES = 2 << 20
MIN_SLOT_BYTES = 1 << 20

Event = tuple[int, bytes]
"""An event and its handle."""


@dataclass(frozen=True)
class Pool:
    """One allocation and its handle; `nbytes` is what can be addressed."""

    number: int
    address: int
    nbytes: int
    handle: bytes


@dataclass
class Slot:
    """A part of a pool that holds one message; `num_records` counts its messages so far."""

    number: int
    pool: Pool
    offset: int
    nbytes: int
    ready: Event
    done: list[Event]
    num_records: int = 0


class CudaExporter:
    """The sending end of a channel: tensors go into slots, descriptors come out; safe from several threads.

    A slot's size is a power of two from 1 MiB on, and each size has at most `max_in_flight` slots: that bounds the
    pools by 4 * `max_in_flight` times the largest message. They are freed at `close` only: importers have them mapped.

    Parameters
    ----------
    runtime
        The library.
    device_index
        The device whose tensors are sent, as torch counts.
    name
        The channel, as errors call it.
    max_in_flight
        How many messages may be shared and not yet released.
    num_consumers
        How many importers open every message; each has a number below it.
    device
        What stands in for torch's device.

    Raises
    ------
    ResourceMissingError
        The device does not answer.
    """

    def __init__(
        self,
        runtime: Runtime,
        device_index: int,
        *,
        name: str = "channel",
        max_in_flight: int = 8,
        num_consumers: int = 1,
        device: TorchDevice | None = None,
    ) -> None:
        self._runtime = runtime
        self._device = device or TorchDevice(device_index)
        self._bus = runtime.bus_of(device_index)
        self._where = f"{runtime.vendor.kind} channel '{name}', device {device_index} ({self._bus})"
        self._identity = uuid.uuid4().hex
        self._max_in_flight = max_in_flight
        self._num_consumers = num_consumers
        self._lock = threading.Lock()
        self._next = 0
        self._in_flight: deque[tuple[int, Slot | None]] = deque()
        self._pools: list[Pool] = []
        self._slots: list[Slot] = []
        self._free: dict[int, deque[Slot]] = {}
        self._closed = False

    def share(self, tensor: Any) -> dict[str, Any]:
        """Copy a tensor into a slot, in the order of torch's current stream, and return its descriptor.

        The tensor may be changed or dropped as after any other operation on that stream. Under ROCm the host waits
        when the importers' devices are a whole pool of messages behind.

        Returns
        -------
        dict
            Small and JSON-able; `CudaImporter.open` takes it. ``sequence`` counts from 0.

        Raises
        ------
        InputError
            Not a dense tensor on this device, or more messages in flight than agreed.
        ResourceMissingError
            No memory for another pool; says how much was wanted. The exporter goes on as before.
        """
        source = self._dense(tensor)
        nbytes = source.numel() * source.element_size()
        with self._lock, self._device.active():
            if self._closed:
                raise input_error(self._where, "an open channel", "share after close", "start the run again")
            if len(self._in_flight) >= self._max_in_flight:
                raise input_error(
                    self._where, f"at most {self._max_in_flight} messages in flight",
                    f"messages {self._in_flight[0][0]} to {self._next - 1} not released",
                    "let the channel wait for a release before it shares again", rule="gpu-channel-full",
                )  # fmt: skip
            slot = self._fill(source, nbytes) if nbytes else None
            sequence = self._next
            self._next += 1
            self._in_flight.append((sequence, slot))
            place = None if slot is None else _place_of(slot)
            dtype = str(source.dtype).removeprefix("torch.")
            shape = tuple(source.shape)
        message = Message(self._identity, os.getpid(), self._bus, sequence, dtype, shape, nbytes, place)
        return message.as_dict()

    def release_through(self, sequence: int) -> None:
        """Take back the slots of all messages up to `sequence`; every importer has opened or dropped them.

        Raises
        ------
        InputError
            A message that was never shared.
        """
        with self._lock:
            if sequence >= self._next:
                raise input_error(
                    self._where, f"a message before {self._next}", f"a release of message {sequence}",
                    "start the run again: the two ends of the channel disagree", rule="gpu-channel-order",
                )  # fmt: skip
            while self._in_flight and self._in_flight[0][0] <= sequence:
                _, slot = self._in_flight.popleft()
                if slot is not None:
                    self._free[slot.nbytes].append(slot)

    def close(self, timeout_s: float = 5.0) -> None:
        """Free the pools; call it when all importers have closed or are gone. A second call does nothing.

        Parameters
        ----------
        timeout_s
            How long to wait for this end's own copies, which may wait for an importer's.

        Raises
        ------
        ResourceMissingError
            A copy did not end in time, so nothing was freed (the end of this process does it); or the library refused.
        """
        with self._lock:
            if self._closed:
                return
            with self._device.active():
                used = [slot.ready[0] for slot in self._slots if slot.num_records]
                await_all(self._runtime, used, timeout_s, self._where, "an importer of this channel")
                self._closed = True
                events = [event for slot in self._slots for event, _ in (slot.ready, *slot.done)]
                steps: list[Step] = [(self._runtime.destroy_event, event) for event in events]
                steps += [(self._runtime.free, pool.address) for pool in self._pools]
                self._in_flight.clear()
                self._slots.clear()
                self._pools.clear()
                self._free.clear()
                do_all(steps)

    def _dense(self, tensor: Any) -> Any:
        import torch

        is_tensor = isinstance(tensor, torch.Tensor)
        is_dense = is_tensor and tensor.layout is torch.strided and not tensor.is_quantized
        if not is_dense or not self._device.owns(tensor):
            got = f"{tensor.layout} tensor of {tensor.dtype} on {tensor.device}" if is_tensor else type(tensor).__name__
            raise input_error(
                self._where, "a dense tensor on this device", got,
                "move it with .to(), or give the edge's two ends a channel of host memory", rule="gpu-tensor",
            )  # fmt: skip
        return tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous()

    def _fill(self, source: Any, nbytes: int) -> Slot:
        size = max(MIN_SLOT_BYTES, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(size, deque())
        if not free:
            self._grow(size)
        # The slot released longest ago: its importers' copies are the likeliest to be complete.
        slot = free[0]
        stream = self._device.stream()
        if slot.num_records:
            self._follow(slot, stream)
        self._runtime.copy(slot.pool.address + slot.offset, source.data_ptr(), nbytes, stream)
        self._runtime.record(slot.ready[0], stream)
        slot.num_records += 1
        # Only now: had a call failed, the slot would still be free.
        free.popleft()
        return slot

    def _follow(self, slot: Slot, stream: int) -> None:
        """Order what comes next in the stream after all earlier use of a slot, here and in the importers."""
        vendor = self._runtime.vendor
        # `ready` too: a message that was dropped unopened has no new `done`, and its copy may be on another stream.
        for event, _ in (slot.ready, *slot.done):
            if vendor.rerecords:
                self._runtime.stream_wait(stream, event)
            else:
                # The importer will record `done` again, and a wait still pending here would then wait for that record,
                # which waits for this copy. Once the host has seen it, no wait is pending on either side.
                self._runtime.host_wait(event)
        if vendor.records_per_event and slot.num_records % vendor.records_per_event == 0:
            fresh = self._event()
            worn, _ = slot.ready
            slot.ready = fresh
            self._runtime.destroy_event(worn)

    def _grow(self, size: int) -> None:
        """Add a pool with slots of one size: two at first, then as many as there are."""
        present = sum(slot.nbytes == size for slot in self._slots)
        count = min(max(2, present), self._max_in_flight - present)
        nbytes = -(-count * size // BLOCK_BYTES) * BLOCK_BYTES
        address = self._allocate(nbytes, count, size)
        undo: list[Step] = [(self._runtime.free, address)]
        try:
            pool = Pool(len(self._pools), address, nbytes, self._runtime.memory_handle(address))
            slots = []
            for index in range(count):
                pairs = []
                for _ in range(1 + self._num_consumers):
                    pairs.append(self._event())
                    undo.append((self._runtime.destroy_event, pairs[-1][0]))
                slots.append(Slot(len(self._slots) + index, pool, index * size, size, pairs[0], pairs[1:]))
        except DriverError:
            do_all(reversed(undo))
            raise
        self._pools.append(pool)
        self._slots += slots
        self._free[size].extend(slots)

    def _allocate(self, nbytes: int, count: int, size: int) -> int:
        try:
            return self._runtime.malloc(nbytes)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
        self._device.give_back_cache()
        try:
            return self._runtime.malloc(nbytes)
        except DriverError as error:
            held = sum(pool.nbytes for pool in self._pools)
            raise missing(
                self._where, f"{nbytes} bytes of device memory for {count} slots of {size} bytes",
                f"{error.words}; the channel holds {held} bytes already",
                "see who holds the memory with gpu_status, send smaller chunks or let fewer be in flight, "
                "and start the run again", rule="gpu-memory",
            ) from error  # fmt: skip

    def _event(self) -> Event:
        event = self._runtime.create_event()
        try:
            return event, self._runtime.event_handle(event)
        except DriverError:
            self._runtime.destroy_event(event)
            raise


def _place_of(slot: Slot) -> Place:
    pool, done = slot.pool, tuple(handle for _, handle in slot.done)
    return Place(pool.number, pool.nbytes, slot.number, slot.offset, pool.handle, slot.ready[1], done)
