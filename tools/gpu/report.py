"""Who has what: devices, topology, leases, the queue, and processes that belong to no lease."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashrt.gpu.devices import DeviceProcess, Inventory
from flashrt.gpu.inventory import take_inventory
from flashrt.gpu.lease_directory import LeaseDirectory
from flashrt.gpu.processes import environment_value, parent_of, pid_namespace
from flashrt.gpu.quarantine import quarantined
from flashrt.gpu.records import Lease


def status(inventory: Inventory | None = None) -> dict[str, Any]:
    """Return the answer of ``gpu_status``, JSON-able.

    Keys: ``devices`` (each with its ``run_name``, its ``state`` (free, leased, checking: looked over after a lease,
    quarantined), ``lease`` and ``holder``, or None), ``topology`` (islands), ``leases``, ``waiting`` (the queue, first
    come first), ``quarantined`` (with the evidence, and the command that brings each back), ``foreign_processes``
    (with the reason why each is foreign), ``notes``.
    """
    inventory = inventory or take_inventory()
    directory = LeaseDirectory()
    everything = directory.live_leases()
    leases = [lease for lease in everything if not lease.ended]
    by_device = {uuid: lease for lease in leases for uuid in lease.uuids}
    checking = {uuid for lease in everything if lease.ended for uuid in lease.uuids}
    apart = quarantined()
    devices = []
    for device in inventory.devices:
        lease = by_device.get(device.uuid)
        state = "leased" if lease else "checking" if device.uuid in checking else "free"
        devices.append(
            {
                **device.as_dict(),
                "run_name": device.run_name,
                "state": "quarantined" if device.uuid in apart else state,
                "lease": lease.lease if lease else None,
                "holder": lease.holder if lease else None,
            }
        )
    return {
        "devices": devices,
        "topology": [island.as_dict() for island in inventory.islands],
        "leases": [lease.as_dict() for lease in leases],
        "waiting": [ticket.as_record() for ticket in directory.live_tickets()],
        "quarantined": [record.as_dict() for record in apart.values()],
        "foreign_processes": foreign_processes(inventory.processes, leases),
        "notes": list(inventory.notes),
    }


def foreign_processes(processes: Sequence[DeviceProcess], leases: Sequence[Lease]) -> list[dict[str, Any]]:
    """Return the processes that the lease of their device does not account for, with the reason.

    A process belongs to a lease when it was started with the lease's environment or descends from its holder's
    process. That is evidence, not proof: in a container the driver may report numbers of the host.
    """
    by_device = {uuid: lease for lease in leases for uuid in lease.uuids}
    foreign = []
    for process in processes:
        lease = by_device.get(process.device)
        if lease is not None and _belongs(process.pid, lease):
            continue
        if process.name is None:
            reason = "not visible from here (another container, or a number of the host)"
        elif lease is None:
            reason = "the device is not leased"
        else:
            reason = f"not started from {lease.lease} of {lease.holder}"
        foreign.append({**process.as_dict(), "reason": reason})
    return foreign


def _belongs(pid: int, lease: Lease) -> bool:
    if environment_value(pid, "FLASHRT_LEASE") == lease.lease:
        return True
    if lease.holder_process is None or lease.namespace != pid_namespace():
        return False
    ancestor: int | None = pid
    while ancestor:
        if ancestor == lease.holder_process.pid:
            return lease.holder_process.runs()
        ancestor = parent_of(ancestor)
    return False
