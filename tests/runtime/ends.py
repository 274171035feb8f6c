"""Both ends of channels in one process: what the runtime opens in several, without starting any."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch as torch_

from flashrt.runtime.channels.endpoint import Endpoint
from flashrt.runtime.channels.hub import Hub, Transport, open_endpoint
from flashrt.runtime.channels.plan import ChannelPlan

SIZE = 1 << 16
WHERE = "operation 'p', port 'y'"
TRANSPORTS: list[Transport] = ["shared_memory", *(["iceoryx2"] if find_spec("iceoryx2") else [])]
"""Every carrier of values within a host; the tests of channels run over each."""
ARENAS: list[Transport] = ["shared_memory"]
"""Those whose memory is FlashRT's own."""


def channel(
    number: int = 0, source: str = "a", targets: Sequence[str] = ("b",), capacity: int = 16, flows: Sequence[int] = ()
) -> ChannelPlan:
    """Return a channel from one endpoint to others."""
    label = f"{source}.y -> {targets[0]}.x"
    return ChannelPlan(number, source, tuple(targets), tuple(flows or (number,)), label, capacity)


@contextmanager
def opened(
    *channels: ChannelPlan, transport: Transport = "shared_memory", spin_us: float = 0.0, torch: bool = True
) -> Iterator[dict[str, Endpoint]]:
    """Open all endpoints of some channels, by name."""
    plans = channels or (channel(),)
    names = list(dict.fromkeys(name for plan in plans for name in (plan.source, *plan.targets)))
    hub = Hub(names, plans, transport, spin_us)
    ends: dict[str, Endpoint] = {}
    try:
        for name in names:
            ends[name] = open_endpoint(hub.wiring(name), torch=torch, inherited=False)
        yield ends
    finally:
        for end in ends.values():
            end.close()
        hub.close()
        ends.clear()
        gc.collect()


def passed(ends: dict[str, Endpoint], value: Any, number: int = 0) -> Any:
    """Send a value from `a` and return what `b` gets."""
    ends["a"].send(number, value, 0)
    received = ends["b"].poll(number)
    assert received is not None
    assert received.last
    assert not received.is_end
    return received.value


def loaned(end: Endpoint, count: int = SIZE, dtype: torch_.dtype = torch_.float32, number: int = 0) -> torch_.Tensor:
    """Return a tensor in memory of a channel."""
    memory = end.loan(number, count * dtype.itemsize, WHERE)
    assert memory is not None
    return torch_.frombuffer(memory, dtype=dtype, count=count)


def take(end: Endpoint, number: int = 0) -> Any:
    """Return the value of the next message, which is there."""
    received = end.poll(number)
    assert received is not None
    return received.value


def memory_files() -> dict[str, int]:
    """Return the anonymous files of channels that this process has open or mapped, and their bytes in memory."""
    found: dict[str, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            status, target = os.stat(f"/proc/self/fd/{name}"), os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("/memfd:flashrt"):
            found[f"{target} {status.st_ino}"] = status.st_blocks * 512
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:flashrt" in line:
            fields = line.split(None, 5)
            found.setdefault(f"{fields[5]} {fields[4]}", 0)
    return found


def arena_bytes() -> int:
    """Return how much memory the arenas take."""
    return sum(size for name, size in memory_files().items() if "arena" in name)
