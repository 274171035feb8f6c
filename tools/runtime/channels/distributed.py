"""The carrier between hosts: torch.distributed over gloo, a thread for each channel on either side.

Values are copied through host memory. Each endpoint is a rank of one gloo group; a channel's number is the tag of its
transfers. A reader's thread takes no more than the channel's capacity, so that a sender that runs ahead waits.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from flashrt.errors import input_error
from flashrt.runtime.channels.arena import available_bytes, check_memory
from flashrt.runtime.channels.carrier import MAX_LOANS, REST, Loan, Polled, Rest
from flashrt.runtime.channels.codec import Message, Received
from flashrt.runtime.channels.plan import ChannelPlan

MEET_TIMEOUT_S = 60
SILENCE_S = 86400
"""How long a transfer may wait for its other side: death is noticed elsewhere, and ends the process."""


class Distributed:
    """One endpoint's channels to and from other hosts.

    Parameters
    ----------
    store
        ``HOST:PORT`` of the store at which all endpoints meet.
    ranks
        Endpoint -> its rank, for all endpoints with such channels.
    address
        This host's, as the others reach it.
    ring
        Called when a message has come, or there is room again.

    Raises
    ------
    InputError
        The endpoints do not meet in time.
    """

    max_loans = MAX_LOANS

    def __init__(
        self,
        endpoint: str,
        channels: Sequence[ChannelPlan],
        store: str,
        ranks: Mapping[str, int],
        address: str,
        ring: Callable[[], None],
    ) -> None:
        self._ring = ring
        self.wake: Callable[[str], None] = lambda endpoint: None
        self._ranks = dict(ranks)
        self._channels = {channel.number: channel for channel in channels}
        self._group = _join(store, ranks[endpoint], len(ranks), address)
        self._outgoing: dict[int, queue.SimpleQueue[Any]] = {}
        self._num_waiting: dict[int, int] = {}
        self._arrived: dict[int, deque[tuple[Message, list[Any]]]] = {}
        self._room: dict[int, threading.Semaphore] = {}
        self._lock = threading.Lock()
        for channel in channels:
            if channel.source == endpoint:
                self._outgoing[channel.number] = queue.SimpleQueue()
                self._num_waiting[channel.number] = 0
                self._start(self._send_all, channel)
            elif endpoint in channel.targets:
                self._arrived[channel.number] = deque()
                self._room[channel.number] = threading.Semaphore(channel.capacity)
                self._start(self._receive_all, channel)

    def _start(self, work: Callable[[ChannelPlan], None], channel: ChannelPlan) -> None:
        threading.Thread(target=self._quietly, args=(work, channel), daemon=True).start()

    def _quietly(self, work: Callable[[ChannelPlan], None], channel: ChannelPlan) -> None:
        try:
            work(channel)
        except RuntimeError:
            # The other side is gone: the supervisor hears of it and ends this process.
            return

    def loan(self, channel: int, num_bytes: int, where: str) -> Loan:
        """Return plain memory; see `Carrier.loan`."""
        check_memory(num_bytes, where, available_bytes())
        span = (ctypes.c_uint8 * num_bytes)()
        return Loan(ctypes.addressof(span), num_bytes, span, span)

    def publish(self, channel: int, message: Message, loans: Sequence[Loan]) -> None:
        """See `Carrier.publish`."""
        for loan in loans:
            loan.published = True
            loan.span = None
        with self._lock:
            self._num_waiting[channel] += 1
        self._outgoing[channel].put((message.pack(), [loan.token for loan in loans]))

    def _send_all(self, channel: ChannelPlan) -> None:
        import torch

        group, outgoing = self._group, self._outgoing[channel.number]
        while True:
            data, blocks = outgoing.get()
            sizes = [len(data), *map(len, blocks)]
            head = torch.zeros(MAX_LOANS + 3, dtype=torch.int64)
            head[0] = len(sizes)
            head[1 : len(sizes) + 1] = torch.tensor(sizes)
            parts = [torch.frombuffer(bytearray(data), dtype=torch.uint8)]
            parts += [torch.frombuffer(block, dtype=torch.uint8) for block in blocks]
            for target in channel.targets:
                for tensor in (head, *parts):
                    group.send([tensor], self._ranks[target], channel.number).wait(timedelta(seconds=SILENCE_S))
            with self._lock:
                self._num_waiting[channel.number] -= 1
            self._ring()

    def _receive_all(self, channel: ChannelPlan) -> None:
        import torch

        group, source = self._group, self._ranks[channel.source]
        while True:
            self._room[channel.number].acquire()
            head = torch.zeros(MAX_LOANS + 3, dtype=torch.int64)
            group.recv([head], source, channel.number).wait(timedelta(seconds=SILENCE_S))
            parts = []
            for size in head[1 : int(head[0]) + 1].tolist():
                part = torch.empty(size, dtype=torch.uint8)
                group.recv([part], source, channel.number).wait(timedelta(seconds=SILENCE_S))
                parts.append(part)
            message = Message.unpack(parts[0].numpy().tobytes())
            self._arrived[channel.number].append((message, parts[1:]))
            self._ring()

    def take_plain(self, channel: int) -> Received | Rest | None:
        """See `Carrier.take_plain`: every message takes the other way here."""
        return REST

    def rehearse(self, channel: int) -> None:
        """See `Carrier.rehearse`: there is nothing to prepare."""

    def poll(self, channel: int) -> Polled | None:
        """See `Carrier.poll`."""
        arrived = self._arrived[channel]
        if not arrived:
            return None
        message, blocks = arrived.popleft()
        self._room[channel].release()
        return Polled(message, len(blocks), lambda block: blocks[block].numpy())

    def has_room(self, channel: int) -> bool:
        """See `Carrier.has_room`."""
        return self._num_waiting[channel] < self._channels[channel].capacity

    def close(self) -> None:
        """See `Carrier.close`: the threads end with the process, or when the other sides have gone."""
        self._group = None


def _join(store: str, rank: int, size: int, address: str) -> Any:
    import torch.distributed as dist

    host, _, port = store.rpartition(":")
    timeout = timedelta(seconds=MEET_TIMEOUT_S)
    try:
        meeting = dist.TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(dist.PrefixStore("channels", meeting), rank, size, options)
    except RuntimeError as error:
        text = " ".join(str(error).split())[:500]
        raise input_error(
            f"channels between hosts, at {store}", f"{size} endpoints that meet within {MEET_TIMEOUT_S} s", text,
            "see that the hosts reach each other on any port; then call again", rule="hosts-do-not-meet",
        ) from error  # fmt: skip
