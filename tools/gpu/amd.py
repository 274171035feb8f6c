"""AMD devices through amdsmi, where it can be imported: degrades field by field like `nvidia`."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import threading
from collections.abc import Iterator
from typing import Any

from flashrt.gpu.devices import Device, DeviceProcess, FieldReader, Inventory, island_numbers
from flashrt.gpu.nvidia import process_name

_XGMI = 2  # amdsmi's link type; the enumeration's name differs between releases, its value does not
_MIB = 1024 * 1024


class AmdMissingError(Exception):
    """Why no AMD device can be asked."""


_importing = threading.Lock()


@functools.cache
def _import_binding() -> tuple[Any, str]:
    try:
        # Without its C library the binding prints, and standard output may be a protocol's.
        with contextlib.redirect_stdout(io.StringIO()):
            import amdsmi
    except ImportError:
        return None, "AMD devices are not looked for: amdsmi is not installed"
    except Exception as error:  # noqa: BLE001 - amdsmi loads its C library on import and fails in many ways
        return None, f"no AMD driver answers on this machine: amdsmi does not load ({type(error).__name__}: {error})"
    return amdsmi, ""


def _binding() -> Any:
    # One at a time: while one thread imports it, another would find a module that is half there.
    with _importing:
        binding, missing = _import_binding()
    if binding is None:
        raise AmdMissingError(missing)
    return binding


@contextlib.contextmanager
def opened_amdsmi() -> Iterator[tuple[Any, tuple[type[BaseException], ...]]]:
    """Yield the amdsmi binding, initialised, and the errors that its calls raise.

    Raises
    ------
    AmdMissingError
        The binding or the driver is not there.
    """
    amdsmi = _binding()
    errors = (amdsmi.AmdSmiException, AttributeError, KeyError, TypeError, ValueError, OSError)
    try:
        amdsmi.amdsmi_init()
    except errors as error:
        raise AmdMissingError(f"no AMD driver answers on this machine ({error})") from None
    try:
        yield amdsmi, errors
    finally:
        FieldReader(amdsmi, errors).ask("shutdown", "amdsmi_shut_down")


def find_amd_devices() -> Inventory:
    """Return the ROCm devices with XGMI islands and the processes on them; never raises for a missing library."""
    try:
        with opened_amdsmi() as (smi, errors):
            return _read_all(smi, errors)
    except AmdMissingError as missing:
        return Inventory((), notes=(str(missing),))


def read_use(smi: Any, errors: tuple[type[BaseException], ...], uuid: str) -> tuple[int | None, list[DeviceProcess]]:
    """Return the memory in use on one device (None: not readable) and its processes.

    Raises
    ------
    ValueError
        The driver does not know the device.
    """
    reader = FieldReader(smi, errors)
    for handle in smi.amdsmi_get_processor_handles():
        if reader.ask("uuid", "amdsmi_get_gpu_device_uuid", handle) == uuid:
            usage = reader.ask("memory", "amdsmi_get_gpu_vram_usage", handle)
            used = None if usage is None else int(usage["vram_used"]) * _MIB
            return used, _read_processes(smi, handle, uuid, reader)
    raise ValueError(f"the driver does not list {uuid}")


def _read_all(smi: Any, errors: tuple[type[BaseException], ...]) -> Inventory:
    machine = FieldReader(smi, errors)
    found = machine.ask("the list of AMD devices", "amdsmi_get_processor_handles") or []
    handles: list[tuple[int, Any, str]] = []
    for index, handle in enumerate(found):
        uuid = machine.ask(f"the UUID of AMD device {index}", "amdsmi_get_gpu_device_uuid", handle)
        if uuid is not None:
            handles.append((_runtime_index(smi, errors, handle, index), handle, str(uuid)))
    handles.sort(key=lambda found: found[0])
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


def _runtime_index(smi: Any, errors: tuple[type[BaseException], ...], handle: Any, index: int) -> int:
    """Return the number that the runtime gives a device, which is what masks count by; older releases do not tell."""
    found = FieldReader(smi, errors).read("index", lambda: int(smi.amdsmi_get_gpu_enumeration_info(handle)["hip_id"]))
    return index if found is None else found


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
        temperature_c=reader.read("temperature_c", lambda: _temperature_c(smi, handle)),
        notes=tuple(reader.notes),
    )


def _temperature_c(smi: Any, handle: Any) -> int:
    kinds, metrics = smi.AmdSmiTemperatureType, smi.AmdSmiTemperatureMetric
    return int(smi.amdsmi_get_temp_metric(handle, kinds.HOTSPOT, metrics.CURRENT))


def _read_processes(smi: Any, handle: Any, uuid: str, machine: FieldReader) -> list[DeviceProcess]:
    def read() -> list[DeviceProcess]:
        return [
            DeviceProcess(uuid, int(entry["pid"]), process_name(int(entry["pid"])), int(entry["mem"]), "compute")
            for entry in smi.amdsmi_get_gpu_process_list(handle)
        ]

    return machine.read(f"the processes of {uuid}", read) or []
