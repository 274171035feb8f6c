"""A process's end of all its channels: send, poll, wait, and memory to write outputs into."""

from __future__ import annotations

import ctypes
import os
import select
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flashrt.clock import monotonic_ns
from flashrt.runtime.channels.board import Board
from flashrt.runtime.channels.carrier import Carrier, Loan, Rest
from flashrt.runtime.channels.codec import (
    END,
    END_MARK,
    VALUE,
    Encoded,
    Message,
    Place,
    Received,
    inline_bytes,
    place_arrays,
    put_together,
    take_apart,
)  # fmt: skip
from flashrt.runtime.channels.errors import ChannelClosedError
from flashrt.runtime.channels.plan import ChannelPlan
from flashrt.runtime.wire import DeviceDecode, DeviceEncode

ROOM_TIMEOUT_MS = 20
WHOLE_BLOCK: tuple[Place, ...] = ((0, 0),)
GRACE_LOOKS = 50
"""How often a reader that was woken looks for its message before it sleeps again: some tens of µs."""


class Endpoint:
    """One process's end of its deployment's channels.

    Sending, polling and waiting belong to one thread; `interrupt` and `ring` may be called from any.

    Parameters
    ----------
    name
        This endpoint, as the plans call it.
    carriers
        Channel -> what moves its messages.
    bells
        Endpoint -> eventfd on which it is woken: this one's own, and those of the endpoints that it sends to or hears.
    torch
        Whether received tensors become torch tensors.
    spin_us
        How long to look again and again before sleeping, in µs: for cores that have nothing else to do.
    owned
        Descriptors that are closed with the endpoint, its bells among them.
    """

    def __init__(
        self,
        name: str,
        channels: Sequence[ChannelPlan],
        carriers: Mapping[int, Carrier],
        board: Board,
        bells: Mapping[str, int],
        *,
        torch: bool,
        spin_us: float = 0.0,
        owned: Iterable[int] = (),
    ) -> None:
        self.name = name
        self.channels = tuple(channels)
        self.board = board
        self._carriers = dict(carriers)
        self._bells = dict(bells)
        self._bell = bells[name]
        self._torch = torch
        self._owned = list(owned)
        self._spin_ns = int(spin_us * 1e3)
        self._loans: dict[int, Loan] = {}
        for carrier in self._carriers.values():
            carrier.wake = self.ring
        self._closed: str | None = None
        self._interrupted = threading.Event()
        self._bells_held = threading.RLock()
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._targets = [
            tuple(self._bells[target] for target in channel.targets if target in self._bells and target != name)
            for channel in channels
        ]
        self.on_device: Callable[[int], DeviceEncode | None] | None = None
        """Channel -> what hands over a tensor that is not in host memory; None: such tensors are copied to it."""
        self.from_device: Callable[[int], DeviceDecode] | None = None
        """Channel -> what opens such a tensor."""

    def send(
        self, channel: int, value: Any, batch: int, *, last: bool = True, ready_ns: int = 0, where: str = ""
    ) -> None:
        """Send a value to every target; waits while the channel is full.

        Raises
        ------
        InputError
            The value cannot be carried, or there is no memory for it; names `where`.
        ChannelClosedError
            The deployment ended while the channel was full.
        """
        # Waking a reader takes longer than what follows, and so happens meanwhile.
        for bell in self._targets[channel]:
            os.eventfd_write(bell, 1)
        where = where or self.channels[channel].label
        on_device = self.on_device(channel) if self.on_device is not None else None
        self._send(channel, take_apart(value, where, on_device), batch, last, ready_ns, VALUE, where)

    def send_end(self, channel: int, batch: int, *, ready_ns: int = 0) -> None:
        """Say that no more chunks of a batch come."""
        self._send(channel, END_MARK, batch, True, ready_ns, END, self.channels[channel].label)

    def _send(
        self, channel: int, encoded: Encoded, batch: int, last: bool, ready_ns: int, kind: int, where: str
    ) -> None:
        carrier = self._carriers[channel]
        if not carrier.has_room(channel):
            self._wait_for_room(channel, carrier)
        loans: list[Loan] = []
        arrays = encoded.arrays
        whole = self._loans.get(arrays[0][0]) if len(arrays) == 1 else None
        if whole is not None and not self._fits(whole, carrier, channel):
            whole = None
        places: Sequence[Place]
        if whole is not None and 0 < arrays[0][1] <= whole.num_bytes:
            # One tensor that lies in loaned memory from its start: nothing to place, nothing to copy.
            del self._loans[whole.address]
            loans.append(whole)
            places, copied = WHOLE_BLOCK, 0
        else:
            loaned = self._find_loans(encoded, carrier, channel, loans) if self._loans else {}
            places, copied = place_arrays(arrays, loaned, len(loans))
        if copied:
            memory = carrier.loan(channel, copied, where)
            copy_block = len(loans)
            for (address, size), (block, offset) in zip(arrays, places, strict=True):
                if block == copy_block and size:
                    ctypes.memmove(memory.address + offset, address, size)
            loans.append(memory)
        inline = b"" if places is WHOLE_BLOCK else inline_bytes(arrays, places)
        message = Message(
            batch, ready_ns, monotonic_ns(), encoded.num_bytes, kind, last, places, encoded.form, inline
        )  # fmt: skip
        carrier.publish(channel, message, loans)
        for bell in self._targets[channel]:
            os.eventfd_write(bell, 1)

    def _fits(self, loan: Loan, carrier: Carrier, channel: int) -> bool:
        """Return whether memory loaned for one channel can be sent on another: it can where a sender has one arena."""
        return carrier.max_loans > 1 or loan.channel == channel

    def _find_loans(
        self, encoded: Encoded, carrier: Carrier, channel: int, loans: list[Loan]
    ) -> dict[int, tuple[int, int]]:
        """Return array -> (block, offset) for arrays that lie in memory loaned from this channel."""
        found: dict[int, tuple[int, int]] = {}
        for index, (address, size) in enumerate(encoded.arrays):
            for start, loan in list(self._loans.items()):
                if not self._fits(loan, carrier, channel):
                    continue
                if not size or not start <= address <= address + size <= start + loan.num_bytes:
                    continue
                if loan not in loans:
                    if len(loans) == carrier.max_loans:
                        continue
                    loans.append(loan)
                found[index] = (loans.index(loan), address - start)
                break
        for loan in loans:
            del self._loans[loan.address]
        return found

    def loan(self, channel: int, num_bytes: int, where: str) -> Any | None:
        """Return memory of the channel to write a value into, with the buffer protocol; None where it has to be copied.

        Sending a tensor over this memory hands it over without a copy. It may be read afterwards, not written.
        """
        carrier = self._carriers[channel]
        self._loans = {address: loan for address, loan in self._loans.items() if not loan.abandoned}
        if not num_bytes or len(self._loans) >= carrier.max_loans:
            return None
        loan = carrier.loan(channel, num_bytes, where)
        loan.channel = channel
        self._loans[loan.address] = loan
        return loan.hand_out()

    def poll(self, channel: int) -> Received | None:
        """Return the channel's next message, or None when there is none yet."""
        carrier = self._carriers[channel]
        if self._torch:
            received = carrier.take_plain(channel)
            if not isinstance(received, Rest):
                return received
        polled = carrier.poll(channel)
        if polled is None:
            return None
        if polled.source_waits:
            self.ring(self.channels[channel].source)
        open_device = self.from_device(channel) if self.from_device is not None else None
        received = put_together(polled.message, polled.borrow, torch=self._torch, on_device=open_device)
        polled.finish()
        return received

    def leave(self, channel: int) -> None:
        """Read no more from a channel: its sender goes on without this endpoint."""
        plan = self.channels[channel]
        self.board.leave(channel, plan.targets.index(self.name))
        self.ring(plan.source)

    def receive(self, channel: int) -> Received:
        """Return the channel's next message; waits for it.

        Raises
        ------
        ChannelClosedError
            The deployment ended first.
        """
        bell, carrier, sleep, looks = self._bell, self._carriers[channel], os.eventfd_read, range(GRACE_LOOKS)
        # The shortest way for what comes most; anything else says so, and goes the other way.
        take: Callable[[int], Received | Rest | None] = carrier.take_plain if self._torch else self.poll
        received = self.poll(channel)
        while received is None:
            if self._spin_ns:
                self.wait()
            else:
                self.check()
                carrier.rehearse(channel)
                sleep(bell)
            # Senders ring before they publish: who was woken looks for a while.
            for _ in looks:
                found = take(channel)
                if found is not None:
                    received = self.poll(channel) if isinstance(found, Rest) else found
                    break
        return received

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until something may have come, for at most `timeout_s`.

        Raises
        ------
        ChannelClosedError
            `interrupt` was called.
        """
        self.check()
        if self._spin_ns and self._spun(monotonic_ns()):
            return
        if timeout_s is None or self._poll.poll(max(timeout_s, 0.0) * 1e3):
            os.eventfd_read(self._bell)
        self.check()

    def _spun(self, start_ns: int) -> bool:
        while monotonic_ns() - start_ns < self._spin_ns:
            if self._poll.poll(0):
                os.eventfd_read(self._bell)
                self.check()
                return True
        return False

    def sleep(self, seconds: float) -> None:
        """Sleep whatever comes, for at most `seconds`.

        Raises
        ------
        ChannelClosedError
            `interrupt` was called, before or meanwhile.
        """
        self.check()
        self._interrupted.wait(seconds)
        self.check()

    def _wait_for_room(self, channel: int, carrier: Carrier) -> None:
        self.board.set_waiting(channel, True)
        try:
            while not carrier.has_room(channel):
                # Whoever takes a message may have looked at the flag just before it was set.
                self.wait(ROOM_TIMEOUT_MS / 1e3)
        finally:
            self.board.set_waiting(channel, False)
            # What woke us may have been meant for a channel that is read next.
            self.ring()

    def check(self) -> None:
        """Raise when `interrupt` was called.

        Raises
        ------
        ChannelClosedError
            With the reason given there.
        """
        if self._closed is not None:
            raise ChannelClosedError(self._closed)

    def interrupt(self, reason: str) -> None:
        """Make every wait here end, now and later, with a reason."""
        self._closed = reason
        self._interrupted.set()
        self.ring()

    def ring(self, endpoint: str | None = None) -> None:
        """Wake an endpoint's `wait`: this one's, or another's."""
        bell = self._bell if endpoint is None else self._bells.get(endpoint)
        # Held, so that no other thread closes it meanwhile, and its number is not another file's.
        with self._bells_held:
            if bell is not None and self._owned:
                os.eventfd_write(bell, 1)

    def close(self) -> None:
        """Let go of all memory and descriptors."""
        for carrier in {id(carrier): carrier for carrier in self._carriers.values()}.values():
            carrier.close()
        self.board.close()
        with self._bells_held:
            for descriptor in self._owned:
                os.close(descriptor)
            self._owned.clear()
