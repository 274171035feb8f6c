"""Time as a value that can be replaced: the machine's monotonic clock, and a virtual one for tests."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """What every part that needs time asks for."""

    def now_ns(self) -> int:
        """Return nanoseconds since an arbitrary but fixed origin; never goes back."""
        ...

    def sleep_until_ns(self, deadline_ns: int) -> None:
        """Return no earlier than `deadline_ns`."""
        ...


def monotonic_ns() -> int:
    """Return the machine's monotonic clock in ns: one clock for all processes of one boot."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class MonotonicClock:
    """The system-wide monotonic clock: comparable between processes of one boot."""

    def now_ns(self) -> int:
        """Return ``CLOCK_MONOTONIC`` in nanoseconds."""
        return monotonic_ns()

    def sleep_until_ns(self, deadline_ns: int) -> None:
        """Sleep, then wait the last fraction of a millisecond without sleeping, so that wake-up noise is small."""
        while (left := deadline_ns - self.now_ns()) > 0:
            if left > 300_000:
                time.sleep((left - 200_000) / 1e9)


class VirtualClock:
    """A clock that moves only when told to; callbacks run in time order, ties in order of registration."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns
        self._order = itertools.count()
        self._events: list[tuple[int, int, Callable[[], None]]] = []

    def now_ns(self) -> int:
        """Return the virtual time in nanoseconds."""
        return self._now_ns

    def sleep_until_ns(self, deadline_ns: int) -> None:
        """Advance to `deadline_ns`, running everything that is due on the way."""
        self.advance_to_ns(deadline_ns)

    def call_at_ns(self, when_ns: int, callback: Callable[[], None]) -> None:
        """Run `callback` when the clock reaches `when_ns`.

        Raises
        ------
        ValueError
            `when_ns` lies in the past.
        """
        if when_ns < self._now_ns:
            raise ValueError(f"call_at_ns({when_ns}): the clock is already at {self._now_ns}")
        heapq.heappush(self._events, (when_ns, next(self._order), callback))

    def advance_to_ns(self, deadline_ns: int) -> None:
        """Run every event due up to and including `deadline_ns` and stop there."""
        while self._events and self._events[0][0] <= deadline_ns:
            when_ns, _, callback = heapq.heappop(self._events)
            self._now_ns = when_ns
            callback()
        self._now_ns = max(self._now_ns, deadline_ns)
