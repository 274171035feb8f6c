"""Finding every device of this machine: NVIDIA, AMD, CPU cores, and emulated ones when asked."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from flashrt.errors import input_error
from flashrt.gpu.amd import find_amd_devices
from flashrt.gpu.devices import KINDS, Device, DeviceProcess, Inventory, Island, Kind, islands_of
from flashrt.gpu.nvidia import find_nvidia_devices

__all__ = ["Device", "DeviceProcess", "Inventory", "Island", "Kind", "islands_of", "take_inventory"]

EMULATED_DEVICES = "FLASHRT_EMULATED_DEVICES"
EMULATED_MEMORY_BYTES = 80 * 1024**3


def take_inventory(
    *,
    kinds: Collection[Kind] = KINDS,
    num_emulated: int | None = None,
    emulated_island_sizes: Sequence[int] | None = None,
) -> Inventory:
    """Look at the machine once and return what is there.

    Parameters
    ----------
    kinds
        The kinds to look for; drivers of other kinds are not touched.
    num_emulated
        Emulated devices to present; by default the number in ``FLASHRT_EMULATED_DEVICES``, else none.
    emulated_island_sizes
        Sizes of their islands, for example ``[4, 4]``; by default one island.

    Raises
    ------
    InputError
        The number of emulated devices is not a whole number of at least 0, or the island sizes do not add up.
    """
    devices: list[Device] = []
    processes: list[DeviceProcess] = []
    notes: list[str] = []
    for kind, find in (("cuda", find_nvidia_devices), ("rocm", find_amd_devices)):
        if kind in kinds:
            found = find()
            devices.extend(found.devices)
            processes.extend(found.processes)
            notes.extend(found.notes)
    if "cpu" in kinds:
        devices.extend(_cpu_devices())
    if "emulated" in kinds:
        devices.extend(_emulated_devices(num_emulated, emulated_island_sizes))
    if {"cuda", "rocm"} <= set(kinds) and not any(device.kind in ("cuda", "rocm") for device in devices):
        notes.append("no GPU here: the CPU cores are leased as devices, one device a core, and everything works")
    return Inventory(tuple(devices), tuple(processes), tuple(notes))


def _cpu_devices() -> list[Device]:
    total, free = _host_memory_bytes()
    notes = ("memory is the machine's, shared by all cores",)
    if total is None:
        notes = ("memory is not readable: /proc/meminfo does not tell",)
    return [
        Device(f"cpu-{core}", "cpu", core, "CPU core", total, free, island="cpu-0", notes=notes)
        for core in sorted(os.sched_getaffinity(0))
    ]


def _host_memory_bytes() -> tuple[int | None, int | None]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in lines)}
    except (OSError, ValueError, IndexError):
        return None, None
    return fields.get("MemTotal"), fields.get("MemAvailable")


def _emulated_devices(count: int | None, island_sizes: Sequence[int] | None) -> list[Device]:
    if count is None:
        count = _emulated_count() if island_sizes is None else sum(island_sizes)
    sizes = [count] if island_sizes is None else list(island_sizes)
    if count < 0 or sum(sizes) != count or any(size < 1 for size in sizes if count):
        raise input_error(
            "emulated devices",
            "a count of at least 0, and island sizes of at least 1 that add up to it",
            f"{count} devices in islands of {sizes}",
            "change one of them and take the inventory again",
            rule="emulated-devices",
        )
    islands = [number for number, size in enumerate(sizes) for _ in range(size)]
    return [
        Device(
            f"emulated-{index}",
            "emulated",
            index,
            "emulated device",
            EMULATED_MEMORY_BYTES,
            EMULATED_MEMORY_BYTES,
            island=f"emulated-island-{islands[index]}",
            notes=("memory is nominal: an emulated device has none of its own",),
        )
        for index in range(count)
    ]


def _emulated_count() -> int:
    text = os.environ.get(EMULATED_DEVICES, "").strip()
    if not text:
        return 0
    if not text.isdecimal() or int(text) > 4096:
        raise input_error(
            f"environment variable {EMULATED_DEVICES}",
            "a whole number from 0 to 4096",
            repr(text),
            f"set {EMULATED_DEVICES}=8, or unset it, and start again",
            rule="emulated-devices",
        )
    return int(text)
