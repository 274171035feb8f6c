"""Where a measurement was made, so that it can be believed and repeated."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

from flashrt.analysis.profile_key import package_versions, processor_name


def describe_environment(devices: Sequence[str]) -> dict[str, Any]:
    """Return host, kernel, packages, load and devices, as they are now.

    `device_states` has the devices by UUID with memory, clocks, what holds these down, temperature; `neighbours` the
    processes that the driver reports on them beside our own.
    """
    states, neighbours = _describe_devices(devices)
    packages = {name: number for name, number in package_versions().items() if name != "python"}
    return {
        "devices": list(devices),
        "device_states": states,
        "neighbours": neighbours,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1m": os.getloadavg()[0],
        "packages": packages,
        "emulated": any(name.startswith("emulated") for name in devices),
    }


def _describe_devices(devices: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    real = [name for name in devices if not name.startswith("emulated")]
    if not real:
        return [], []
    from flashrt import gpu

    inventory = gpu.inventory()
    used = [device for device in inventory.devices if device.run_name in real]
    numbers = {device.uuid for device in used}
    own = {os.getpid(), os.getppid()}
    neighbours = [found.as_dict() for found in inventory.processes if found.device in numbers and found.pid not in own]
    return [device.as_dict() for device in used], neighbours
