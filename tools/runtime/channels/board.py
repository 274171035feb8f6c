"""The board: one piece of shared memory with the counters and queues of all channels, and where every worker is.

It is an anonymous file (memfd) that the supervisor makes and its workers inherit: the kernel frees it with its last
user, whatever kills them, and it has no name that could be left behind.
"""

from __future__ import annotations

import mmap
import os
import platform
import threading
from collections.abc import Sequence

from flashrt.runtime.channels.plan import ChannelPlan

ENTRY_BYTES = 2048
"""Room of one message's description; a longer one goes into a block of memory."""
MAX_CYCLES = 8192
"""How many cycles are remembered: far more than may be under way."""
NUM_CYCLES, STOP_AFTER, FIRST_CYCLE = 0, 1, 2
FIRST_STATUS = FIRST_CYCLE + MAX_CYCLES
BUBBLE = -1
"""A cycle in which no new batch begins, so that staggered operations come to their turn."""
STATUS_WORDS = 3
WORD = 8
NEVER = 1 << 62
PAGE = mmap.PAGESIZE
WEAKLY_ORDERED = platform.machine().lower() not in {"x86_64", "amd64", "i686", "i386"}
_FIRST_LOCK, _SECOND_LOCK = threading.Lock(), threading.Lock()


def fence() -> None:
    """Make what this thread wrote before visible to other processes before what it writes after.

    x86 keeps the order of writes by itself. Elsewhere, releasing one lock and then taking another does.
    """
    if WEAKLY_ORDERED:
        with _FIRST_LOCK:
            pass
        with _SECOND_LOCK:
            pass


class Board:
    """Counters and queues of all channels.

    Every word has one writer. Channel ``c`` has: how many messages were published; for each target how many it has
    taken, and for the source whether it waits for room; then `capacity` entries of `ENTRY_BYTES`.

    Parameters
    ----------
    descriptor
        The memfd; its size is set here.
    endpoints
        All endpoints, in the same order in every process.
    """

    def __init__(self, descriptor: int, endpoints: Sequence[str], channels: Sequence[ChannelPlan]) -> None:
        self.endpoints = {name: index for index, name in enumerate(endpoints)}
        self._channels = tuple(channels)
        words = FIRST_STATUS + STATUS_WORDS * len(endpoints)
        self._at: list[int] = []
        for channel in channels:
            self._at.append(words)
            words += 2 + len(channel.targets)
        start = -(-words * WORD // PAGE) * PAGE
        self._entries: list[int] = []
        for channel in channels:
            self._entries.append(start)
            start += channel.capacity * ENTRY_BYTES
        if os.fstat(descriptor).st_size < start:
            os.ftruncate(descriptor, start)
        self.memory = mmap.mmap(descriptor, start)
        self.words = memoryview(self.memory)[: words * WORD].cast("q")

    def published(self, channel: int) -> int:
        """Return how many messages the channel has had."""
        return self.words[self._at[channel]]

    def places(self, channel: int, target: int) -> tuple[int, int, int]:
        """Return where in `words` are: messages published, whether the source waits, messages a target has taken."""
        at = self._at[channel]
        return at, at + 1, at + 2 + target

    def publish(self, channel: int) -> None:
        """Count one more message, after its entry was written."""
        fence()
        self.words[self._at[channel]] += 1

    def taken(self, channel: int, target: int) -> int:
        """Return how many messages a target (its place in the plan) has taken."""
        return self.words[self._at[channel] + 2 + target]

    def take(self, channel: int, target: int) -> bool:
        """Count one more message as taken; return whether the source waits for room."""
        self.words[self._at[channel] + 2 + target] += 1
        fence()
        return bool(self.words[self._at[channel] + 1])

    def leave(self, channel: int, target: int) -> None:
        """Say that a target takes no more messages, so that nobody waits for it."""
        self.words[self._at[channel] + 2 + target] = NEVER
        fence()

    def has_room(self, channel: int) -> bool:
        """Return whether one more message fits."""
        plan, at, words = self._channels[channel], self._at[channel], self.words
        oldest = words[at] - plan.capacity
        if len(plan.targets) == 1:
            return words[at + 2] > oldest
        return all(words[place] > oldest for place in range(at + 2, at + 2 + len(plan.targets)))

    def set_waiting(self, channel: int, waiting: bool) -> None:
        """Say that the source waits for room, so that whoever takes a message wakes it."""
        self.words[self._at[channel] + 1] = waiting
        fence()

    def entry(self, channel: int, message: int) -> int:
        """Return where the entry of the channel's `message`-th message begins."""
        return self._entries[channel] + message % self._channels[channel].capacity * ENTRY_BYTES

    def admit(self, cycle: int, batch: int) -> None:
        """Begin a cycle with a batch, or with `BUBBLE`; saying it twice changes nothing."""
        if cycle < self.words[NUM_CYCLES]:
            return
        self.words[FIRST_CYCLE + cycle % MAX_CYCLES] = batch
        fence()
        self.words[NUM_CYCLES] = cycle + 1
        fence()

    def num_cycles(self) -> int:
        """Return how many cycles have begun."""
        return self.words[NUM_CYCLES]

    def batch_of(self, cycle: int) -> int:
        """Return the batch that a cycle began with, or `BUBBLE`."""
        return self.words[FIRST_CYCLE + cycle % MAX_CYCLES]

    def stop(self, count: int) -> None:
        """Say that no more than `count` cycles come."""
        self.words[STOP_AFTER] = count + 1
        fence()

    def stop_after(self) -> int:
        """Return after how many cycles to stop; -1: not yet said."""
        return self.words[STOP_AFTER] - 1

    def set_status(self, endpoint: int, operation: int, batch: int, since_ns: int) -> None:
        """Note what an endpoint is doing: the number of its operation (-1: none), the batch, and since when."""
        at = FIRST_STATUS + STATUS_WORDS * endpoint
        self.words[at] = operation + 1
        self.words[at + 1] = batch
        self.words[at + 2] = since_ns

    def status(self, endpoint: int) -> tuple[int, int, int]:
        """Return the operation's number (-1: none), the batch, and since when (ns)."""
        at = FIRST_STATUS + STATUS_WORDS * endpoint
        operation, batch, since_ns = self.words[at : at + 3]
        return operation - 1, batch, since_ns

    def close(self) -> None:
        """Unmap the board."""
        self.words.release()
        self.memory.close()
