"""The clock of an emulated device: when its operations would begin and end, from profiled times alone.

A value carries the moment at which it is there on this clock. An operation begins when its device is free and its
inputs are there, takes its profiled time, and the process sleeps until that moment has come in reality. So the time
that processes need for waking up and passing values on is used up inside the time that the operation stands for, and
does not add up. Where reality is later than the clock by more than `MAX_LAG_NS`, the clock moves on: an emulated device
never makes up for more than that.
"""

from __future__ import annotations

from collections.abc import Callable

from flashrt.clock import monotonic_ns

MAX_LAG_NS = 20_000_000
Sleep = Callable[[int], None]


class Timeline:
    """One worker's emulated devices, which always work together.

    Parameters
    ----------
    sleep_until_ns
        Called with the moment until which the device is held.
    now_ns
        The clock that stands for reality.
    """

    def __init__(self, sleep_until_ns: Sleep, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self.free_ns = 0
        self._sleep_until_ns = sleep_until_ns
        self._now_ns = now_ns

    def hold(self, ready_ns: int, duration_ns: int) -> tuple[int, int]:
        """Occupy the device for `duration_ns`, not before `ready_ns`; return begin and end on the emulated clock."""
        start_ns = max(self.free_ns, ready_ns)
        end_ns = start_ns + duration_ns
        late_ns = self._now_ns() - end_ns
        if late_ns > MAX_LAG_NS:
            start_ns, end_ns = start_ns + late_ns, end_ns + late_ns
        self.free_ns = end_ns
        if late_ns < 0:
            self._sleep_until_ns(end_ns)
        return start_ns, end_ns
