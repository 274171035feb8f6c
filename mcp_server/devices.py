"""What the argument ``devices`` of a tool means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashrt.errors import input_error, listed

PREFIXES = ("cpu-", "cuda:", "rocm:", "emulated-")


def device_names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the devices of a call: names, or all devices of a lease.

    Raises
    ------
    InputError
        An ended or unknown lease, or a name that is no device.
    """
    if not given:
        return ()
    if isinstance(given, str) and given.startswith("lease"):
        from flashrt import gpu

        return tuple(device_name(device.kind, device.index) for device in gpu.lease_devices(given))
    names = [given] if isinstance(given, str) else list(given)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise input_error(
            "argument 'devices'", "every device once", f"{listed(twice)} twice", "name different devices",
            rule="device-twice",
        )  # fmt: skip
    bad = [name for name in names if not _is_device(name)]
    if bad:
        raise input_error(
            "argument 'devices'", "a lease id, or names such as cpu-0, cuda:0, emulated-0", listed(bad),
            "call gpu_acquire and pass its lease", rule="unknown-device",
        )  # fmt: skip
    real = [name for name in names if not name.startswith("emulated-")]
    if real:
        from flashrt import gpu

        known = [device_name(device.kind, device.index) for device in gpu.inventory().devices]
        absent = [name for name in real if name not in known]
        if absent:
            raise input_error(
                "argument 'devices'", f"devices of this machine: {listed(known)}", listed(absent),
                "call gpu_status for what there is, or gpu_acquire for a lease", rule="absent-device", valid=known,
                name=absent[0],
            )  # fmt: skip
    return tuple(names)


def _is_device(name: object) -> bool:
    if not isinstance(name, str):
        return False
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    return prefix is not None and name.removeprefix(prefix).isdigit()


def device_name(kind: str, index: int) -> str:
    """Return how runs call a device: ``cpu-0``, ``cuda:1``, ``emulated-3``."""
    return f"{kind}:{index}" if kind in {"cuda", "rocm"} else f"{kind}-{index}"


def default_devices(deployment: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return the devices that a deployment measured without a lease runs on: this machine's first of its kind.

    Raises
    ------
    InputError
        The machine has fewer than the deployment's groups name.
    """
    kind = str(deployment.get("devices") or "cpu")
    groups = deployment.get("groups")
    numbers = [number for group in groups.values() for number in group] if isinstance(groups, Mapping) else []
    if kind == "emulated" or not all(isinstance(number, int) for number in numbers):
        return ()
    from flashrt import gpu

    known = [device_name(d.kind, d.index) for d in gpu.inventory().devices if d.kind == kind]
    needed = max(numbers, default=-1) + 1
    if needed > len(known):
        raise input_error(
            f"{where}, key 'groups'", f"device numbers below {len(known)}: this machine has {listed(known)}",
            f"device {needed - 1}", "place it on fewer devices, or write devices: emulated with a profile",
            rule="too-few-devices",
        )  # fmt: skip
    return tuple(known[:needed])
