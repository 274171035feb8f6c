"""What a device is: values shared by every way of finding one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

Kind = Literal["cuda", "rocm", "cpu", "emulated"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LINKS: Mapping[Kind, str] = {"cuda": "nvlink", "rocm": "xgmi", "cpu": "host memory", "emulated": "emulated"}

Value = TypeVar("Value")


def device_name(kind: str, index: int) -> str:
    """Return how runs call a whole device: ``cpu-0``, ``cuda:1``, ``emulated-3``; see also `Device.run_name`."""
    return f"{kind}:{index}" if kind in {"cuda", "rocm"} else f"{kind}-{index}"


@dataclass(frozen=True)
class Device:
    """One thing that can be leased; a field that could not be read is None and `notes` says why.

    Parameters
    ----------
    uuid
        The key of everything: leases, records, locks. ``GPU-…`` from the driver, else ``cpu-0``, ``emulated-0``.
    index
        Place in the kind's own order: PCI order for CUDA, the core's number for CPUs.
    island
        Name of the group joined by fast links; a device without such links is an island of its own.
    throttle_reasons
        Why the clock is below its maximum, in the driver's terms; empty where it says none, or nothing.
    link_bandwidth_bytes_s
        Sum over the active fast links, one direction, where the driver tells.
    parent
        UUID of the GPU that this MIG instance is a part of; None: a whole device.
    """

    uuid: str
    kind: Kind
    index: int
    name: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    island: str
    pci_bus_id: str | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    sm_clock_mhz: int | None = None
    max_sm_clock_mhz: int | None = None
    throttle_reasons: tuple[str, ...] = ()
    link_bandwidth_bytes_s: int | None = None
    parent: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def mask(self) -> str:
        """What names it in the mask of its framework: its index, or the UUID of a MIG instance."""
        return str(self.index) if self.parent is None else self.uuid

    @property
    def run_name(self) -> str:
        """How runs call it: ``cpu-0``, ``cuda:1``, ``cuda:MIG-…``."""
        return device_name(self.kind, self.index) if self.parent is None else f"{self.kind}:{self.uuid}"

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-able mapping of all fields."""
        return {
            **dataclasses.asdict(self), "notes": list(self.notes), "throttle_reasons": list(self.throttle_reasons),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Device:
        """Rebuild a device from `as_dict`; fields that a newer version added are left out."""
        known = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in fields.items() if name in known}
        lists = {name: tuple(values.get(name, ())) for name in ("notes", "throttle_reasons")}
        return cls(**{**values, **lists})


@dataclass(frozen=True)
class Island:
    """Devices joined by fast links."""

    name: str
    kind: Kind
    link: str
    devices: tuple[str, ...]
    bandwidth_bytes_s: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-able mapping of all fields."""
        return {**dataclasses.asdict(self), "devices": list(self.devices)}


@dataclass(frozen=True)
class DeviceProcess:
    """A process that the driver reports on a device; `pid` may belong to another PID namespace."""

    device: str
    pid: int
    name: str | None
    memory_bytes: int | None
    mode: Literal["compute", "graphics"]

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-able mapping of all fields."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Inventory:
    """The devices of this machine at one moment, with kind sentences about what is missing."""

    devices: tuple[Device, ...]
    processes: tuple[DeviceProcess, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def islands(self) -> tuple[Island, ...]:
        """Devices grouped by island, in device order."""
        return islands_of(self.devices)

    def of_kind(self, kind: Kind) -> tuple[Device, ...]:
        """Return the devices of one kind, in index order."""
        return tuple(device for device in self.devices if device.kind == kind)

    @property
    def best_kind(self) -> Kind:
        """The kind that a request without one gets: cuda, else rocm, else cpu; never emulated."""
        present = {device.kind for device in self.devices}
        return next((kind for kind in ("cuda", "rocm") if kind in present), "cpu")

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-able mapping."""
        return {
            "devices": [device.as_dict() for device in self.devices],
            "islands": [island.as_dict() for island in self.islands],
            "processes": [process.as_dict() for process in self.processes],
            "notes": list(self.notes),
        }


class FieldReader:
    """Reads a device field by field: what fails becomes None and a note, never an exception."""

    def __init__(self, library: Any, errors: tuple[type[BaseException], ...]) -> None:
        self._library = library
        self._errors = errors
        self.notes: list[str] = []

    def without_notes(self) -> FieldReader:
        """Return a reader of the same library whose notes are its own."""
        return FieldReader(self._library, self._errors)

    def ask(self, field: str, function: str, *arguments: Any) -> Any:
        """Return what a function of the library answers, like `read`; a release may lack the function itself."""
        return self.read(field, lambda: getattr(self._library, function)(*arguments))

    def read(self, field: str, call: Callable[[], Value]) -> Value | None:
        """Return `call()`, or None with a note that names `field` and the driver's words."""
        try:
            return call()
        except self._errors as error:
            self.notes.append(f"{field} is not readable: {error or type(error).__name__}")
            return None


def islands_of(devices: Iterable[Device]) -> tuple[Island, ...]:
    """Group devices by island name; an island's bandwidth is that of its slowest member."""
    members: dict[str, list[Device]] = {}
    for device in devices:
        members.setdefault(device.island, []).append(device)
    return tuple(_island(name, group) for name, group in members.items())


def _island(name: str, group: Sequence[Device]) -> Island:
    bandwidths = [device.link_bandwidth_bytes_s for device in group]
    known = [bandwidth for bandwidth in bandwidths if bandwidth is not None]
    return Island(
        name=name,
        kind=group[0].kind,
        link=LINKS[group[0].kind] if len(group) > 1 else "none",
        devices=tuple(device.uuid for device in group),
        bandwidth_bytes_s=min(known) if len(known) == len(group) else None,
    )


def island_numbers(num_devices: int, joined: Iterable[tuple[int, int]]) -> list[int]:
    """Return each device's island: connected components, numbered by their first member.

    Parameters
    ----------
    joined
        Pairs of device positions with a confirmed fast link.
    """
    root = list(range(num_devices))

    def find(position: int) -> int:
        while root[position] != position:
            position = root[position]
        return position

    for first, second in joined:
        low, high = sorted((find(first), find(second)))
        root[high] = low
    order = {component: number for number, component in enumerate(sorted({find(i) for i in range(num_devices)}))}
    return [order[find(position)] for position in range(num_devices)]
