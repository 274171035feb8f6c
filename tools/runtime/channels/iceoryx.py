"""The carrier over iceoryx2: one publish-subscribe service a channel, with the values in its samples.

A sample begins with the message's description; its array data follows at a page boundary. iceoryx2 would block every
thread in `send` on a full queue, for ever if the reader is dead: it discards instead, and room is counted on the board.
Its files have names, in /dev/shm, that begin with the deployment's token: the janitor finds them all.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flashrt.clock import monotonic_ns
from flashrt.errors import input_error
from flashrt.runtime.channels.arena import check_memory, holder_of
from flashrt.runtime.channels.board import PAGE, Board
from flashrt.runtime.channels.carrier import REST, Loan, Polled, Rest
from flashrt.runtime.channels.codec import Message, Received
from flashrt.runtime.channels.plan import ChannelPlan
from flashrt.runtime.janitor import SHM

LENGTHS = struct.Struct("<QQ")
"""Bytes of the description, and where the array data begins."""
SPARE_SAMPLES = 4
"""Samples of a channel beyond those that may wait in it: being filled, or being read."""
LOAN_TIMEOUT_S = 5.0


class Iceoryx:
    """iceoryx2 services of one endpoint.

    Parameters
    ----------
    token
        Names the deployment.

    Raises
    ------
    InputError
        iceoryx2 is not installed.
    """

    max_loans = 1

    def __init__(self, board: Board, endpoint: str, channels: Sequence[ChannelPlan], token: str) -> None:
        self._iox = iox = _import()
        self.wake: Callable[[str], None] = lambda endpoint: None
        self._board = board
        self._channels = {channel.number: channel for channel in channels}
        iox.set_log_level(iox.LogLevel.Error)
        config = iox.config.default()
        config.global_cfg.prefix = iox.FileName.new(prefix(token))
        config.global_cfg.root_path = iox.Path.new(str(root(token)))
        self._node = (
            iox.NodeBuilder.new()
            .config(config)
            .signal_handling_mode(iox.SignalHandlingMode.Disabled)
            .create(iox.ServiceType.Ipc)
        )
        self._place = {
            channel.number: channel.targets.index(endpoint) for channel in channels if endpoint in channel.targets
        }  # fmt: skip
        self._unheard: dict[int, Any] = {}
        """Services whose targets have not all been there yet: what is sent before is lost."""
        self._publishers: dict[int, Any] = {}
        self._keepers: dict[int, Any] = {}
        self._subscribers: dict[int, Any] = {}
        for channel in channels:
            if endpoint == channel.source:
                service = self._unheard[channel.number] = self._service(channel)
                self._publishers[channel.number] = (
                    service.publisher_builder()
                    .initial_max_slice_len(PAGE)
                    .max_loaned_samples(2)
                    .override_sample_preallocation(channel.capacity + SPARE_SAMPLES)
                    .allocation_strategy(iox.AllocationStrategy.PowerOfTwo)
                    .backpressure_strategy(iox.BackpressureStrategy.DiscardData)
                    .create()
                )
                # Keeps a sample from being used again while its memory still has users in this process.
                self._keepers[channel.number] = service.subscriber_builder().create()
            if endpoint in channel.targets:
                self._subscribers[channel.number] = self._service(channel).subscriber_builder().create()

    def _service(self, channel: ChannelPlan) -> Any:
        iox = self._iox
        return (
            self._node.service_builder(iox.ServiceName.new(f"channel-{channel.number}"))
            .publish_subscribe(iox.Slice[ctypes.c_uint8])
            .max_publishers(1)
            .max_subscribers(len(channel.targets) + 1)
            .max_nodes(len(channel.targets) + 1)
            .subscriber_max_buffer_size(channel.capacity)
            .subscriber_max_borrowed_samples(channel.capacity + SPARE_SAMPLES)
            .enable_safe_overflow(False)
            .payload_alignment(iox.Alignment.new(PAGE))
            .open_or_create()
        )

    def loan(self, channel: int, num_bytes: int, where: str) -> Loan:
        """Return the data part of a new sample; see `Carrier.loan`."""
        return self._loan(channel, num_bytes, PAGE, where)

    def _loan(self, channel: int, num_bytes: int, data_at: int, where: str) -> Loan:
        free = os.statvfs(SHM)
        check_memory(num_bytes + data_at, where, free.f_bavail * free.f_frsize, "/dev/shm")
        sample = self._take_sample(channel, num_bytes + data_at, where)
        address = sample.payload_ptr + data_at
        loan = Loan(address, num_bytes, None, [sample, data_at])
        token = loan.token

        def release() -> None:
            # Before it is sent: the unsent sample. After: what keeps the sent one.
            token.clear()
            loan.abandoned = not loan.published

        loan.span = holder_of(address, num_bytes, release)
        return loan

    def _take_sample(self, channel: int, num_bytes: int, where: str) -> Any:
        """Return a sample; waits a while for a reader to let one go."""
        deadline_ns = monotonic_ns() + int(LOAN_TIMEOUT_S * 1e9)
        while True:
            try:
                return self._publishers[channel].loan_slice_uninit(num_bytes)
            except self._iox.LoanError as error:
                if monotonic_ns() > deadline_ns:
                    count = self._channels[channel].capacity + SPARE_SAMPLES
                    raise input_error(
                        where, f"room for {count} values of {num_bytes / 1e6:.1f} MB",
                        f"{type(error).__name__}: {error} for {LOAN_TIMEOUT_S:g} s",
                        "clone what an operation keeps for long, or write transport: shared_memory; then call again",
                        rule="values-kept",
                    ) from error  # fmt: skip
            time.sleep(1e-3)

    def publish(self, channel: int, message: Message, loans: Sequence[Loan]) -> None:
        """See `Carrier.publish`."""
        data = message.pack()
        if loans and LENGTHS.size + len(data) <= loans[0].token[1]:
            loan = loans[0]
        else:
            # The description does not fit before the data, or there is no data: a sample that has room for both.
            size = loans[0].num_bytes if loans else 0
            data_at = -(-(LENGTHS.size + len(data)) // PAGE) * PAGE
            loan = self._loan(channel, size, data_at, self._channels[channel].label)
            if loans:
                ctypes.memmove(loan.address, loans[0].address, size)
                loans[0].published = True
                loans[0].span = None
        sample, data_at = loan.token
        start = loan.address - data_at
        ctypes.memmove(start, LENGTHS.pack(len(data), data_at) + data, LENGTHS.size + len(data))
        keeper = self._keepers[channel]
        loan.token[:] = []
        sample.assume_init().send()
        loan.published = True
        loan.token.append(keeper.receive())
        loan.span = None
        self._board.publish(channel)

    def take_plain(self, channel: int) -> Received | Rest | None:
        """See `Carrier.take_plain`: every message takes the other way here."""
        return REST

    def rehearse(self, channel: int) -> None:
        """See `Carrier.rehearse`: there is nothing to prepare."""

    def poll(self, channel: int) -> Polled | None:
        """See `Carrier.poll`."""
        try:
            sample = self._subscribers[channel].receive()
        except self._iox.ReceiveError as error:
            plan = self._channels[channel]
            raise input_error(
                plan.label, f"at most {plan.capacity + SPARE_SAMPLES} values kept by its reader",
                f"{type(error).__name__}: {error}",
                "clone what an operation keeps for long, or write transport: shared_memory; then call again",
                rule="values-kept",
            ) from error  # fmt: skip
        if sample is None:
            return None
        start = sample.payload_ptr
        length, data_at = LENGTHS.unpack(ctypes.string_at(start, LENGTHS.size))
        message = Message.unpack(ctypes.string_at(start + LENGTHS.size, length))
        total = sample.payload().len()
        waits = self._board.take(channel, self._place[channel])
        held = [sample]

        def open_block(block: int) -> Any:
            return holder_of(start + data_at, total - data_at, held.clear)

        return Polled(message, int(total > data_at), open_block, source_waits=waits)

    def has_room(self, channel: int) -> bool:
        """See `Carrier.has_room`; there is none until every target is there."""
        service = self._unheard.get(channel)
        if service is not None:
            if service.dynamic_config.number_of_subscribers <= len(self._channels[channel].targets):
                return False
            del self._unheard[channel]
        return self._board.has_room(channel)

    def close(self) -> None:
        """See `Carrier.close`."""
        self._unheard.clear()
        self._publishers.clear()
        self._keepers.clear()
        self._subscribers.clear()
        self._node = None


def _import() -> Any:
    try:
        import iceoryx2
    except ImportError as error:
        raise input_error(
            "deployment, key 'transport'", "iceoryx2 installed for transport: iceoryx2", str(error),
            "pip install 'flashrt[iceoryx2]', or write transport: shared_memory", rule="no-transport",
        ) from error  # fmt: skip
    return iceoryx2


def prefix(token: str) -> str:
    """Return what the names of a deployment's shared memory begin with."""
    return f"flashrt-{token}-"


def root(token: str) -> Path:
    """Return the folder of a deployment's management files."""
    return SHM / f"flashrt-{token}"
