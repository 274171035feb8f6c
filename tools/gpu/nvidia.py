"""NVIDIA devices through NVML: whatever the driver cannot say is left out with a note."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Literal

from flashrt.gpu.devices import Device, DeviceProcess, FieldReader, Inventory, island_numbers

# Bytes per second, per link and direction, by NVLink generation (vendor data sheets).
_LINK_BYTES_S = {1: 20_000_000_000, 2: 25_000_000_000, 3: 25_000_000_000, 4: 25_000_000_000, 5: 50_000_000_000}


def find_nvidia_devices() -> Inventory:
    """Return the CUDA devices with NVLink islands and the processes on them; never raises for a missing driver."""
    try:
        import pynvml
    except ImportError as error:
        return Inventory((), notes=(f"NVIDIA devices cannot be seen: nvidia-ml-py is not installed ({error})",))
    errors = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, AttributeError, OSError, ValueError)
    try:
        pynvml.nvmlInit()
    except errors as error:
        return Inventory((), notes=(f"no NVIDIA driver answers on this machine ({error})",))
    try:
        return _read_all(pynvml, errors)
    finally:
        try:
            pynvml.nvmlShutdown()
        except errors:
            # Nothing was allocated on the device: a driver that cannot shut down changes no answer.
            pass


def _read_all(nvml: Any, errors: tuple[type[BaseException], ...]) -> Inventory:
    machine = FieldReader(errors)
    num_devices = machine.read("the number of NVIDIA devices", nvml.nvmlDeviceGetCount) or 0
    handles: list[tuple[int, Any, str]] = []
    for index in range(num_devices):
        handle = machine.read(f"NVIDIA device {index}", lambda index=index: nvml.nvmlDeviceGetHandleByIndex(index))
        if handle is None:
            continue
        uuid = machine.read(f"the UUID of NVIDIA device {index}", lambda h=handle: nvml.nvmlDeviceGetUUID(h))
        if uuid is not None:
            handles.append((index, handle, uuid))
    islands = island_numbers(len(handles), _nvlink_pairs(nvml, [handle for _, handle, _ in handles], machine))
    devices = tuple(
        _read_device(nvml, errors, index, handle, uuid, f"nvlink-{island}")
        for (index, handle, uuid), island in zip(handles, islands, strict=True)
    )
    processes = tuple(
        process for _, handle, uuid in handles for process in _read_processes(nvml, handle, uuid, machine)
    )
    return Inventory(devices, processes, tuple(machine.notes))


def _read_device(
    nvml: Any, errors: tuple[type[BaseException], ...], index: int, handle: Any, uuid: str, island: str
) -> Device:
    reader = FieldReader(errors)
    memory = reader.read("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    bus = reader.read("pci_bus_id", lambda: nvml.nvmlDeviceGetPciInfo(handle).busId)
    load = reader.read("utilization_percent", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    temperature = reader.read("temperature_c", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    name = reader.read("name", lambda: nvml.nvmlDeviceGetName(handle))
    bandwidth = _link_bandwidth_bytes_s(nvml, errors, handle)
    mig = FieldReader(errors).read("mig", lambda: nvml.nvmlDeviceGetMigMode(handle)[0])
    if mig:
        reader.notes.append("MIG is enabled: the device is leased whole, not by instance")
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
        link_bandwidth_bytes_s=bandwidth,
        notes=tuple(reader.notes),
    )


def _nvlink_pairs(nvml: Any, handles: list[Any], machine: FieldReader) -> list[tuple[int, int]]:
    """Pairs whose peer access over NVLink is confirmed: an active link alone may lead to a bridge or a switch."""
    pairs = []
    for first, second in itertools.combinations(range(len(handles)), 2):
        num_notes = len(machine.notes)
        status = machine.read(
            "NVLink peer status (each device now counts as an island of its own)",
            lambda a=handles[first], b=handles[second]: nvml.nvmlDeviceGetP2PStatus(
                a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK
            ),
        )
        if len(machine.notes) > num_notes and machine.notes[-1] in machine.notes[:-1]:
            machine.notes.pop()
        if status == nvml.NVML_P2P_STATUS_OK:
            pairs.append((first, second))
    return pairs


def _link_bandwidth_bytes_s(nvml: Any, errors: tuple[type[BaseException], ...], handle: Any) -> int | None:
    """Sum the active links; None where no link answers, which is also the case on devices without NVLink."""
    total, num_answers = 0, 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        reader = FieldReader(errors)
        active = reader.read("link", lambda link=link: nvml.nvmlDeviceGetNvLinkState(handle, link))
        if active is None:
            break
        version = reader.read("version", lambda link=link: nvml.nvmlDeviceGetNvLinkVersion(handle, link))
        if active and version in _LINK_BYTES_S:
            total += _LINK_BYTES_S[version]
        num_answers += 1
    return total if num_answers else None


def _read_processes(nvml: Any, handle: Any, uuid: str, machine: FieldReader) -> list[DeviceProcess]:
    modes: tuple[tuple[Literal["compute", "graphics"], str], ...] = (
        ("compute", "nvmlDeviceGetComputeRunningProcesses"),
        ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    )
    found: dict[int, DeviceProcess] = {}
    for mode, function in modes:
        listed = machine.read(f"the {mode} processes of {uuid}", lambda f=function: getattr(nvml, f)(handle))
        for process in listed or ():
            memory = process.usedGpuMemory
            found.setdefault(
                process.pid,
                DeviceProcess(
                    uuid, process.pid, process_name(process.pid), None if memory is None else int(memory), mode
                ),
            )
    return list(found.values())


def process_name(pid: int) -> str | None:
    """Return the command name of a process, or None when it is not visible from here."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None
