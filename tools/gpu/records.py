"""What is written about a lease, for everybody on the machine to read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flashrt.gpu.devices import Device
from flashrt.gpu.exports import environment
from flashrt.gpu.processes import ProcessIdentity, boottime_ns
from flashrt.gpu.selection import Request

SCHEMA = "flashrt/lease@1"


@dataclass(frozen=True)
class Lease:
    """Devices that one holder has to itself until a point in time.

    Parameters
    ----------
    lease
        Its id, never used again on this machine.
    token
        Fencing token: grows with every lease given, so whoever shows a smaller one is out of date.
    since
        Wall clock, ISO 8601 with zone: for people; nothing is decided by it.
    expires_ns
        When it is lost unless renewed, in nanoseconds since boot (``CLOCK_BOOTTIME``).
    keeper, holder_process
        The process that holds the locks, and the one whose death ends the lease (None: only time and release do).
    namespace
        PID namespace in which both numbers mean something.
    last_request
        Name of the last renewal that the keeper carried out.
    ended
        Why it has ended, while its keeper still looks whether the devices are free again; empty: it is held.
    """

    lease: str
    token: int
    holder: str
    purpose: str
    since: str
    ttl_s: float
    expires_ns: int
    devices: tuple[Device, ...]
    keeper: ProcessIdentity
    namespace: str
    holder_process: ProcessIdentity | None = None
    last_request: str = ""
    ended: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """The variables to export; see `flashrt.gpu.environment`."""
        return environment(self.devices, self.lease, self.token)

    @property
    def uuids(self) -> tuple[str, ...]:
        """The devices' keys, in device order."""
        return tuple(device.uuid for device in self.devices)

    @property
    def remaining_s(self) -> float:
        """Seconds until it is lost unless renewed; 0 when that moment has passed."""
        return max(0.0, (self.expires_ns - boottime_ns()) / 1e9)

    def __str__(self) -> str:
        purpose = f" for {self.purpose}" if self.purpose else ""
        if self.ended:
            return f"{', '.join(self.uuids)} looked over after the lease of {self.holder} ({self.lease}: {self.ended})"
        return f"{self.holder}{purpose} holds {', '.join(self.uuids)} ({self.lease}, {self.remaining_s:.0f} s left)"

    def as_dict(self) -> dict[str, Any]:
        """Return the answer of ``gpu_acquire``: JSON-able, with the environment and the seconds left."""
        return {
            **self.as_record(),
            "names": [device.run_name for device in self.devices],
            "environment": self.environment,
            "remaining_s": round(self.remaining_s, 3),
            "notes": self.notes,
        }

    @property
    def notes(self) -> list[str]:
        """What its holder has to know about the devices."""
        if len(self.devices) > 1 and any(device.parent for device in self.devices):
            return [
                "MIG: CUDA shows a process the first instance of its mask only; start a process an instance, each with "
                "CUDA_VISIBLE_DEVICES set to one of them (the workers of a deployment are started so)"
            ]
        return []

    def as_record(self) -> dict[str, Any]:
        """Return what goes to disk."""
        return {
            "schema": SCHEMA,
            **dataclasses.asdict(self),
            "devices": [device.as_dict() for device in self.devices],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Lease:
        """Rebuild a lease from `as_record`.

        Raises
        ------
        ValueError, KeyError, TypeError
            The record is not one of this version.
        """
        if record["schema"] != SCHEMA:
            raise ValueError(f"expected schema {SCHEMA}, got {record['schema']!r}")
        holder = record["holder_process"]
        names = {entry.name for entry in dataclasses.fields(cls)}
        values = {name: value for name, value in record.items() if name in names}
        values |= {
            "devices": tuple(Device.from_dict(device) for device in record["devices"]),
            "keeper": ProcessIdentity(**record["keeper"]),
            "holder_process": None if holder is None else ProcessIdentity(**holder),
        }
        return cls(**values)


@dataclass(frozen=True)
class Ticket:
    """A place in the queue."""

    number: int
    holder: str
    purpose: str
    request: Request
    candidates: tuple[str, ...] = field(default=())
    ttl_s: float = 600.0

    def __str__(self) -> str:
        return f"{self.holder} waits for {self.request}"

    def as_record(self) -> dict[str, Any]:
        """Return what goes to disk."""
        return {**dataclasses.asdict(self), "candidates": list(self.candidates)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Ticket:
        """Rebuild a ticket from `as_record`."""
        return cls(
            record["number"],
            record["holder"],
            record["purpose"],
            Request.from_dict(record["request"]),
            tuple(record["candidates"]),
            float(record.get("ttl_s", 600.0)),
        )
