"""Watches who else uses the devices of a measurement: a process of its own, so that it takes no time from the harness.

The order comes as one JSON object on standard input, then one line at each turn of the measurement: ``begin`` (with the
mark of the system's processes), ``end``, ``after``. Each is answered when the sample has been taken, the last one with
what was found. Processes below the harness, and those with the mark, are the run's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from flashrt.gpu.devices import DeviceProcess
from flashrt.gpu.processes import environment_value

Reader = Callable[[], tuple[int | None, list[DeviceProcess]]]
EVERY_S = 1.0
MARK = "FLASHRT_SYSTEM"
_GONE_S = 2.0
_KERNEL_THREADS = 2
_LEAST_TICKS = 2


@dataclass(frozen=True)
class Stat:
    """What the kernel says of one process."""

    name: str
    parent: int
    ticks: int
    children_ticks: int
    start: int
    core: int


def read_stats() -> dict[int, Stat]:
    """Return every process that can be seen."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            head, _, tail = Path(f"/proc/{entry}/stat").read_text().rpartition(")")
            fields = tail.split()
            found[int(entry)] = Stat(
                head.partition("(")[2], int(fields[1]), int(fields[11]) + int(fields[12]),
                int(fields[13]) + int(fields[14]), int(fields[19]), int(fields[36]),
            )  # fmt: skip
    return found


@dataclass
class Family:
    """Who belongs to the run."""

    root: int
    mark: str = ""

    def has(self, pid: int, stats: Mapping[int, Stat]) -> bool:
        """Return whether a process is the harness, below it, or carries the system's mark."""
        ancestor = pid
        while ancestor in stats:
            if ancestor == self.root:
                return True
            ancestor = stats[ancestor].parent
        return bool(self.mark) and environment_value(pid, MARK) == self.mark


@dataclass
class CoreUse:
    """Processor time that others take on some cores between `begin` and `end`."""

    cores: frozenset[int]
    family: Family
    _last: dict[int, Stat] = field(default_factory=dict)
    _used: dict[tuple[int, str], float] = field(default_factory=dict)
    _begin_s: float = 0.0
    _end_s: float = 0.0

    def begin(self) -> None:
        """Count from now on."""
        # Reading all processes takes a while: the window holds all of it, so that none used more than there was.
        self._begin_s = time.monotonic()
        self._last = read_stats()

    def sample(self) -> None:
        """Add what was used since the last sample."""
        now = read_stats()
        self._end_s = time.monotonic()
        gone: dict[int, int] = {}
        for pid, last in self._last.items():
            if pid not in now or now[pid].start != last.start:
                gone[last.parent] = gone.get(last.parent, 0) + last.ticks + last.children_ticks
        for pid, stat in now.items():
            before = self._last.get(pid)
            if before is not None and before.start != stat.start:
                before = None
            used = float(stat.ticks - (before.ticks if before else 0)) if stat.core in self.cores else 0.0
            # Children that came and went between two samples show in their parent only; on which core is not known.
            if before is not None:
                short = stat.children_ticks - before.children_ticks - gone.get(pid, 0)
                used += max(0, short) * len(self.cores) / (os.cpu_count() or 1)
            if used >= _LEAST_TICKS and _KERNEL_THREADS not in (pid, stat.parent) and not self.family.has(pid, now):
                self._used[pid, stat.name] = self._used.get((pid, stat.name), 0.0) + used
        self._last = now

    def as_dict(self) -> dict[str, Any]:
        """Return the shares of the cores' time, largest first; together no more than there is.

        What a process used counts for the core that it was on last, so that those which move between cores may add up
        to more: then all are scaled down.
        """
        window_s = max(self._end_s - self._begin_s, 1e-9)
        whole = window_s * max(len(self.cores), 1) * os.sysconf("SC_CLK_TCK")
        whole = max(whole, sum(self._used.values()))
        found = sorted(self._used.items(), key=lambda item: -item[1])
        return {
            "cores": sorted(self.cores), "window_s": round(window_s, 3),
            "share": round(sum(self._used.values()) / whole, 4),
            "processes": [{"pid": pid, "name": name, "share": round(used / whole, 4)} for (pid, name), used in found],
        }  # fmt: skip


@dataclass
class DeviceUse:
    """The processes that the driver reports on some GPUs, with the phases in which each was there."""

    family: Family
    readers: Sequence[Reader]
    _seen: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def sample(self, phase: str) -> bool:
        """Take note of who is there; return whether it is anybody but the run's own."""
        others = False
        stats = read_stats() if self.readers else {}
        for read in self.readers:
            for process in read()[1]:
                entry = self._seen.setdefault((process.device, process.pid), {**process.as_dict(), "seen": []})
                entry["own"] = entry.get("own", False) or self.family.has(process.pid, stats)
                entry["memory_bytes"] = max(entry["memory_bytes"] or 0, process.memory_bytes or 0)
                others = others or not entry["own"]
                if phase and phase not in entry["seen"]:
                    entry["seen"].append(phase)
        return others

    def as_list(self) -> list[dict[str, Any]]:
        """Return all that were seen."""
        return list(self._seen.values())


@contextlib.contextmanager
def opened_readers(devices: Sequence[Mapping[str, str]]) -> Iterator[list[Reader]]:
    """Yield one function a GPU that returns the memory in use and the processes."""
    uuids = {kind: [one["uuid"] for one in devices if one["kind"] == kind] for kind in ("cuda", "rocm")}
    with contextlib.ExitStack() as stack:
        readers: list[Reader] = []
        if uuids["cuda"]:
            from flashrt.gpu import nvidia

            nvml = stack.enter_context(nvidia.opened_nvml())
            readers += [partial(nvidia.read_use, *nvml, uuid) for uuid in uuids["cuda"]]
        if uuids["rocm"]:
            from flashrt.gpu import amd

            smi = stack.enter_context(amd.opened_amdsmi())
            readers += [partial(amd.read_use, *smi, uuid) for uuid in uuids["rocm"]]
        yield readers


def main() -> None:
    """Serve one measurement."""
    order = json.loads(_read_line())
    try:
        with opened_readers(order["devices"]) as readers:
            serve(Family(order["root"]), readers, frozenset(order["cores"]))
    except Exception as error:  # noqa: BLE001 - each binding has errors of its own; the harness says them
        _say({"error": f"{type(error).__name__}: {error}"})


def serve(family: Family, readers: Sequence[Reader], cores: frozenset[int]) -> None:
    """Sample at each turn of the measurement and once a second while it is timed."""
    on_gpus, on_cores = DeviceUse(family, readers), CoreUse(cores, family)
    on_gpus.sample("before")
    _say({"turn": "before"})
    timed = False
    while True:
        ready, _, _ = select.select([0], [], [], EVERY_S if timed else None)
        turn = json.loads(_read_line()) if ready else {"turn": "tick"}
        if turn["turn"] == "begin":
            family.mark, timed = turn["mark"], True
            on_cores.begin()
            on_gpus.sample("during")
        elif timed:
            on_cores.sample()
            on_gpus.sample("during")
            timed = turn["turn"] == "tick"
        if turn["turn"] == "after":
            break
        if ready:
            _say({"turn": turn["turn"]})
    # The driver may need a moment to notice that the system's processes are gone.
    deadline = time.monotonic() + _GONE_S
    while DeviceUse(family, readers).sample("") and time.monotonic() < deadline:
        time.sleep(EVERY_S / 10)
    on_gpus.sample("after")
    _say({"turn": "after", "gpus": on_gpus.as_list(), "cores": on_cores.as_dict()})


def _read_line() -> bytes:
    """Return the next line; the harness going away ends this process."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            sys.exit()
        line += piece
    return line


def _say(found: dict[str, Any]) -> None:
    os.write(1, json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main()
