"""NVIDIA devices through NVML: whatever the driver cannot say is left out with a note.

A GPU with MIG enabled runs nothing by itself: its instances are the devices, each with a UUID of its own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from flashrt.gpu.devices import Device, DeviceProcess, FieldReader, Inventory, island_numbers

# Bytes per second, per link and direction, by NVLink generation (vendor data sheets).
_LINK_BYTES_S = {1: 20_000_000_000, 2: 25_000_000_000, 3: 25_000_000_000, 4: 25_000_000_000, 5: 50_000_000_000}


class NvidiaMissingError(Exception):
    """Why no NVIDIA device can be asked."""


@contextlib.contextmanager
def opened_nvml() -> Iterator[tuple[Any, tuple[type[BaseException], ...]]]:
    """Yield the NVML binding, initialised, and the errors that its calls raise.

    Raises
    ------
    NvidiaMissingError
        The binding or the driver is not there.
    """
    try:
        import pynvml
    except ImportError as error:
        raise NvidiaMissingError(f"NVIDIA devices cannot be seen: nvidia-ml-py is not installed ({error})") from None
    errors = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, AttributeError, OSError, ValueError)
    try:
        pynvml.nvmlInit()
    except errors as error:
        raise NvidiaMissingError(f"no NVIDIA driver answers on this machine ({error})") from None
    try:
        yield pynvml, errors
    finally:
        # Nothing was allocated on the device: a driver that cannot shut down changes no answer.
        with contextlib.suppress(*errors):
            pynvml.nvmlShutdown()


def find_nvidia_devices() -> Inventory:
    """Return the CUDA devices with NVLink islands and the processes on them; never raises for a missing driver."""
    try:
        with opened_nvml() as (nvml, errors):
            return _read_all(nvml, errors)
    except NvidiaMissingError as missing:
        return Inventory((), notes=(str(missing),))


def read_use(nvml: Any, errors: tuple[type[BaseException], ...], uuid: str) -> tuple[int | None, list[DeviceProcess]]:
    """Return the memory in use on one device (None: not readable) and its processes.

    Raises
    ------
    NVMLError
        The driver does not know the device, or does not answer for it.
    """
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    reader = FieldReader(nvml, errors)
    memory = reader.ask("memory", "nvmlDeviceGetMemoryInfo", handle)
    return None if memory is None else int(memory.used), _read_processes(handle, uuid, reader)


def _read_all(nvml: Any, errors: tuple[type[BaseException], ...]) -> Inventory:
    machine = FieldReader(nvml, errors)
    num_devices = machine.ask("the number of NVIDIA devices", "nvmlDeviceGetCount") or 0
    handles: list[tuple[int, Any, str]] = []
    for index in range(num_devices):
        handle = machine.ask(f"NVIDIA device {index}", "nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            continue
        uuid = machine.ask(f"the UUID of NVIDIA device {index}", "nvmlDeviceGetUUID", handle)
        if uuid is not None:
            handles.append((index, handle, uuid))
    islands = island_numbers(len(handles), _nvlink_pairs(nvml, [handle for _, handle, _ in handles], machine))
    devices: list[Device] = []
    processes: list[DeviceProcess] = []
    for (index, handle, uuid), island in zip(handles, islands, strict=True):
        device = _read_device(nvml, FieldReader(nvml, errors), index, handle, uuid, f"nvlink-{island}")
        found = [(device, handle)]
        # Boards without MIG say so with an error: that is an answer, and no note.
        mode = machine.without_notes().ask("mig", "nvmlDeviceGetMigMode", handle)
        if mode is not None and mode[0]:
            found = _read_instances(nvml, errors, handle, device)
            if not found:
                machine.notes.append(
                    f"{uuid} has MIG enabled and no instance, so nothing can run there: make some with nvidia-smi mig"
                )
        for one, place in found:
            devices.append(one)
            processes += _read_processes(place, one.uuid, machine)
    return Inventory(tuple(devices), tuple(processes), tuple(machine.notes))


def _read_instances(
    nvml: Any, errors: tuple[type[BaseException], ...], handle: Any, parent: Device
) -> list[tuple[Device, Any]]:
    """Return the MIG instances of a GPU with their handles; what only the whole GPU tells is the parent's."""
    silent = FieldReader(nvml, errors)
    found = []
    for slot in range(silent.ask("slots", "nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        # Slots may be empty.
        instance = silent.ask("instance", "nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
        uuid = None if instance is None else silent.ask("uuid", "nvmlDeviceGetUUID", instance)
        if uuid is None:
            continue
        reader = FieldReader(nvml, errors)
        memory = reader.ask("memory", "nvmlDeviceGetMemoryInfo", instance)
        shared = (f"a MIG instance of {parent.uuid}: temperature, clocks and their limits are the whole GPU's",)
        device = replace(
            parent,
            uuid=uuid,
            name=silent.ask("name", "nvmlDeviceGetName", instance) or f"{parent.name} MIG",
            memory_total_bytes=None if memory is None else int(memory.total),
            memory_free_bytes=None if memory is None else int(memory.free),
            island=uuid,
            utilization_percent=None,
            link_bandwidth_bytes_s=None,
            parent=parent.uuid,
            notes=(*shared, *reader.notes),
        )
        found.append((device, instance))
    return found


def _read_device(nvml: Any, reader: FieldReader, index: int, handle: Any, uuid: str, island: str) -> Device:
    memory = reader.ask("memory", "nvmlDeviceGetMemoryInfo", handle)
    bus = reader.read("pci_bus_id", lambda: nvml.nvmlDeviceGetPciInfo(handle).busId)
    load = reader.read("utilization_percent", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    temperature = reader.ask("temperature_c", "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)
    name = reader.ask("name", "nvmlDeviceGetName", handle)
    # Boards without NVLink say so with an error: that is an answer, and no note.
    silent = reader.without_notes()
    return Device(
        uuid=uuid,
        kind="cuda",
        index=index,
        name=name or "NVIDIA device",
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_free_bytes=None if memory is None else int(memory.free),
        island=island,
        pci_bus_id=bus.decode(errors="replace") if isinstance(bus, bytes) else bus,
        utilization_percent=load,
        temperature_c=temperature,
        sm_clock_mhz=silent.read("clock", lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        max_sm_clock_mhz=silent.read("clock", lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        throttle_reasons=_throttle_reasons(nvml, silent, handle),
        link_bandwidth_bytes_s=_link_bandwidth_bytes_s(nvml, silent, handle),
        notes=tuple(reader.notes),
    )


def _throttle_reasons(nvml: Any, reader: FieldReader, handle: Any) -> tuple[str, ...]:
    """Return the names of the reasons for which the driver holds the clock down, idleness among them."""
    mask = reader.ask("reasons", "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    prefix = "nvmlClocksThrottleReason"
    bits = {name.removeprefix(prefix): getattr(nvml, name) for name in dir(nvml) if name.startswith(prefix)}
    return tuple(
        sorted(
            name for name, bit in bits.items() if isinstance(bit, int) and bit.bit_count() == 1 and (mask or 0) & bit
        )
    )


def _nvlink_pairs(nvml: Any, handles: list[Any], machine: FieldReader) -> list[tuple[int, int]]:
    """Pairs whose peer access over NVLink is confirmed: an active link alone may lead to a bridge or a switch."""
    pairs = []
    reader = machine.without_notes()
    for first, second in itertools.combinations(range(len(handles)), 2):
        status = reader.ask(
            "NVLink peer status (such devices count as islands of their own)",
            "nvmlDeviceGetP2PStatus",
            handles[first],
            handles[second],
            nvml.NVML_P2P_CAPS_INDEX_NVLINK,
        )
        if status == nvml.NVML_P2P_STATUS_OK:
            pairs.append((first, second))
    # One sentence, not one for every pair.
    machine.notes.extend(dict.fromkeys(reader.notes))
    return pairs


def _link_bandwidth_bytes_s(nvml: Any, reader: FieldReader, handle: Any) -> int | None:
    """Sum the active links; None where no link answers, which is also the case on devices without NVLink."""
    total, num_answers = 0, 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        active = reader.ask("link", "nvmlDeviceGetNvLinkState", handle, link)
        if active is None:
            break
        version = reader.ask("version", "nvmlDeviceGetNvLinkVersion", handle, link)
        total += _LINK_BYTES_S.get(version, 0) if active else 0
        num_answers += 1
    return total if num_answers else None


def _read_processes(handle: Any, uuid: str, machine: FieldReader) -> list[DeviceProcess]:
    modes: tuple[tuple[Literal["compute", "graphics"], str], ...] = (
        ("compute", "nvmlDeviceGetComputeRunningProcesses"),
        ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    )
    found: dict[int, DeviceProcess] = {}
    for mode, function in modes:
        for process in machine.ask(f"the {mode} processes of {uuid}", function, handle) or ():
            memory = process.usedGpuMemory
            memory_bytes = None if memory is None else int(memory)
            name = process_name(process.pid)
            found.setdefault(process.pid, DeviceProcess(uuid, process.pid, name, memory_bytes, mode))
    return list(found.values())


def process_name(pid: int) -> str | None:
    """Return the command name of a process, or None when it is not visible from here."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
