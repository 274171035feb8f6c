"""AMD devices through amdsmi, where it can be imported: degrades field by field like `nvidia`."""

from __future__ import annotations

import itertools
from typing import Any

from flashrt.gpu.devices import Device, DeviceProcess, FieldReader, Inventory, island_numbers
from flashrt.gpu.nvidia import process_name

_XGMI = 2  # amdsmi's link type; the enumeration's name differs between releases, its value does not
_MIB = 1024 * 1024


def find_amd_devices() -> Inventory:
    """Return the ROCm devices with XGMI islands and the processes on them; never raises for a missing library."""
    try:
        import amdsmi
    except ImportError:
        return Inventory((), notes=("AMD devices are not looked for: amdsmi is not installed",))
    except Exception as error:  # noqa: BLE001 - amdsmi loads its C library on import and fails in many ways
        return Inventory((), notes=(f"AMD devices cannot be seen: amdsmi does not load ({error})",))
    errors = (amdsmi.AmdSmiException, AttributeError, KeyError, TypeError, ValueError, OSError)
    try:
        amdsmi.amdsmi_init()
    except errors as error:
        return Inventory((), notes=(f"no AMD driver answers on this machine ({error})",))
    try:
        return _read_all(amdsmi, errors)
    finally:
        FieldReader(amdsmi, errors).ask("shutdown", "amdsmi_shut_down")


def _read_all(smi: Any, errors: tuple[type[BaseException], ...]) -> Inventory:
    machine = FieldReader(smi, errors)
    found = machine.ask("the list of AMD devices", "amdsmi_get_processor_handles") or []
    handles: list[tuple[int, Any, str]] = []
    for index, handle in enumerate(found):
        uuid = machine.ask(f"the UUID of AMD device {index}", "amdsmi_get_gpu_device_uuid", handle)
        if uuid is not None:
            handles.append((index, handle, str(uuid)))
    pairs = []
    for first, second in itertools.combinations(range(len(handles)), 2):
        link = machine.ask(
            f"the link between AMD devices {first} and {second}",
            "amdsmi_topo_get_link_type",
            handles[first][1],
            handles[second][1],
        )
        if link is not None and int(link["type"]) == _XGMI:
            pairs.append((first, second))
    islands = island_numbers(len(handles), pairs)
    devices = tuple(
        _read_device(smi, errors, index, handle, uuid, f"xgmi-{island}")
        for (index, handle, uuid), island in zip(handles, islands, strict=True)
    )
    processes = tuple(process for _, handle, uuid in handles for process in _read_processes(smi, handle, uuid, machine))
    return Inventory(devices, processes, tuple(machine.notes))


def _read_device(
    smi: Any, errors: tuple[type[BaseException], ...], index: int, handle: Any, uuid: str, island: str
) -> Device:
    reader = FieldReader(smi, errors)
    name = reader.read("name", lambda: str(smi.amdsmi_get_gpu_asic_info(handle)["market_name"]))

    def memory_bytes() -> tuple[int, int]:
        usage = smi.amdsmi_get_gpu_vram_usage(handle)
        return int(usage["vram_total"]) * _MIB, int(usage["vram_used"]) * _MIB

    memory = reader.read("memory", memory_bytes)
    return Device(
        uuid=uuid,
        kind="rocm",
        index=index,
        name=name or "AMD device",
        memory_total_bytes=None if memory is None else memory[0],
        memory_free_bytes=None if memory is None else memory[0] - memory[1],
        island=island,
        pci_bus_id=reader.read("pci_bus_id", lambda: str(smi.amdsmi_get_gpu_device_bdf(handle))),
        utilization_percent=reader.read(
            "utilization_percent", lambda: int(smi.amdsmi_get_gpu_activity(handle)["gfx_activity"])
        ),
        notes=tuple(reader.notes),
    )


def _read_processes(smi: Any, handle: Any, uuid: str, machine: FieldReader) -> list[DeviceProcess]:
    def read() -> list[DeviceProcess]:
        return [
            DeviceProcess(uuid, int(entry["pid"]), process_name(int(entry["pid"])), int(entry["mem"]), "compute")
            for entry in smi.amdsmi_get_gpu_process_list(handle)
        ]

    return machine.read(f"the processes of {uuid}", read) or []
