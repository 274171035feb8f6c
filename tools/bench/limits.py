"""How much of a host a system under test may take before it is ended, so that others can go on working there."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flashrt.runtime.lifeline import marked

MANY_TASKS = 128
"""So many more threads on the machine than at the start are a reason to count the system's processes."""


@dataclass(frozen=True)
class Limits:
    """What a system may take; of the memory and the disks that is a share of what there is."""

    memory_share: float = 0.9
    """Of the host's memory, all processes of the system together."""
    processes: int = 512
    disk_bytes: int = 32 << 30
    """By how much the free space of its folder, the temporary folder and shared memory may fall."""
    disk_left_bytes: int = 256 << 20
    """What has to be left free there."""
    wall_s: float = 7200.0


@dataclass
class LimitWatch:
    """Compares what a system has taken with its limits."""

    limits: Limits
    mark: str
    folder: Path
    _begin_s: float = field(default_factory=time.monotonic)
    _free: dict[str, int] = field(default_factory=dict)
    _num_tasks: int = field(default_factory=lambda: num_tasks())

    def __post_init__(self) -> None:
        for place in (str(self.folder), tempfile.gettempdir(), "/dev/shm"):
            free = free_bytes(place)
            if free is not None:
                self._free[place] = free

    def find_excess(self, numbers: Sequence[int]) -> tuple[str, str] | None:
        """Return (what is allowed, what it takes) where a limit is passed; `numbers` are its known processes."""
        limits = self.limits
        seconds = time.monotonic() - self._begin_s
        if seconds > limits.wall_s:
            return f"an end within {limits.wall_s:.0f} s", f"{seconds:.0f} s and no end"
        held, total = sum(private_bytes(number) for number in numbers), total_bytes()
        if held > limits.memory_share * total:
            allowed = f"at most {limits.memory_share:.0%} of this host's {total / 2**30:.1f} GiB of memory"
            return allowed, f"{held / 2**30:.1f} GiB in use"
        if len(numbers) > limits.processes or num_tasks() > self._num_tasks + MANY_TASKS:
            count = len({*numbers, *marked(self.mark)})
            if count > limits.processes:
                return f"at most {limits.processes} processes", f"{count}"
        for place, before in self._free.items():
            free = free_bytes(place)
            if free is None:
                continue
            if before - free > limits.disk_bytes:
                return (
                    f"at most {limits.disk_bytes / 2**30:.1f} GiB taken of the disk of {place}",
                    f"{(before - free) / 2**30:.1f} GiB less free than at its start",
                )
            if free < limits.disk_left_bytes < before:
                return f"{limits.disk_left_bytes >> 20} MiB left free at {place}", f"{free >> 20} MiB"
        return None


def private_bytes(number: int) -> int:
    """Return the memory that a process has for itself, or 0 when it has ended; what it shares counts for nobody."""
    try:
        fields = Path(f"/proc/{number}/statm").read_text().split()
        return (int(fields[1]) - int(fields[2])) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def total_bytes() -> int:
    """Return the host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def num_tasks() -> int:
    """Return how many threads all processes of this machine have."""
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
    except (OSError, IndexError, ValueError):
        return 0


def free_bytes(place: str) -> int | None:
    """Return the free space of a folder's file system, or None where there is no such folder."""
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None
