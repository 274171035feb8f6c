"""Where values from other processes wait until an operation of this one asks for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from flashrt.runtime.channels.codec import Received
from flashrt.runtime.channels.endpoint import Endpoint


class Inbox:
    """What has come for each dataflow of one worker; a channel is read only when something on it is asked for.

    So what nobody needs yet stays in its channel, and a sender that runs ahead waits.

    Parameters
    ----------
    flows
        Channel -> numbers of the dataflow on it that ends in this worker.
    """

    def __init__(self, endpoint: Endpoint, flows: Mapping[int, Sequence[int]]) -> None:
        self._endpoint = endpoint
        self._flows = {channel: tuple(numbers) for channel, numbers in flows.items()}
        self._channel = {number: channel for channel, numbers in flows.items() for number in numbers}
        self._waiting: dict[int, deque[Received]] = {number: deque() for number in self._channel}
        self._latest: dict[int, tuple[Received, ...]] = {}

    def has(self, flow: int) -> bool:
        """Return whether something of the dataflow is here."""
        return bool(self._waiting[flow]) or self._poll(flow)

    def _poll(self, flow: int) -> bool:
        channel = self._channel[flow]
        received = self._endpoint.poll(channel)
        if received is None:
            return False
        for number in self._flows[channel]:
            self._waiting[number].append(received)
        return True

    def take(self, flow: int) -> Received:
        """Return the next message of a dataflow; waits for it.

        Raises
        ------
        ChannelClosedError
            The deployment ended first.
        """
        waiting = self._waiting[flow]
        if not waiting:
            channel = self._channel[flow]
            received = self._endpoint.receive(channel)
            for number in self._flows[channel]:
                self._waiting[number].append(received)
        return waiting.popleft()

    def chunks(self, flow: int, batch: int) -> Iterator[Received]:
        """Yield the chunks of a dataflow's batch as they come."""
        while True:
            received = self.take(flow)
            assert received.batch == batch, (flow, received.batch, batch)
            if not received.is_end:
                yield received
            if received.last:
                return

    def latest(self, flow: int, batch: int) -> tuple[Received, ...]:
        """Return the chunks of the newest whole value that is here, of `batch` or before; waits only for the first."""
        waiting = self._waiting[flow]
        while True:
            while self._poll(flow):
                pass
            while (value := self._next_whole(flow)) and value[0].batch <= batch:
                for _ in value:
                    waiting.popleft()
                self._latest[flow] = value
            if flow in self._latest:
                return tuple(part for part in self._latest[flow] if not part.is_end)
            self._endpoint.wait()

    def _next_whole(self, flow: int) -> tuple[Received, ...]:
        """Return the parts of the oldest value that is here whole, or nothing."""
        parts = []
        for received in self._waiting[flow]:
            parts.append(received)
            if received.last:
                return tuple(parts)
        return ()

    def __len__(self) -> int:
        """How many messages wait."""
        return sum(map(len, self._waiting.values()))
