"""Devices that several agents on one machine share: what is there, who has it, and leases that the kernel enforces.

The door of this part. Importing it loads no driver and no framework.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flashrt.gpu.checking import Checkup, restore
from flashrt.gpu.devices import KINDS, Device, DeviceProcess, Inventory, Island, Kind
from flashrt.gpu.exports import environment
from flashrt.gpu.inventory import take_inventory
from flashrt.gpu.leases import acquire, check, holders, lease_devices, release, renew
from flashrt.gpu.quarantine import Quarantine, quarantined
from flashrt.gpu.records import Lease
from flashrt.gpu.report import status

__all__ = [
    "Checkup",
    "Device",
    "DeviceProcess",
    "Inventory",
    "Island",
    "Kind",
    "Lease",
    "Quarantine",
    "acquire",
    "check",
    "environment",
    "holders",
    "inventory",
    "lease_devices",
    "quarantined",
    "release",
    "renew",
    "restore",
    "status",
]


def inventory(
    *,
    kinds: Collection[Kind] = KINDS,
    num_emulated: int | None = None,
    emulated_island_sizes: Sequence[int] | None = None,
) -> Inventory:
    """Look at the machine once and return its devices; see `flashrt.gpu.inventory.take_inventory`."""
    return take_inventory(kinds=kinds, num_emulated=num_emulated, emulated_island_sizes=emulated_island_sizes)
