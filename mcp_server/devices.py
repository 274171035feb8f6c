"""What the argument ``devices`` of a tool means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrt.errors import Finding, InputError, input_error, listed
from flashrt.gpu import Device, Kind
from flashrt.gpu.exports import is_instance

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

        return _not_apart([(device.run_name, device.uuid) for device in gpu.lease_devices(given)])
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

        known = {device.run_name: device.uuid for device in gpu.inventory().devices}
        absent = [name for name in real if name not in known]
        if absent:
            raise input_error(
                "argument 'devices'", f"devices of this machine: {listed(known)}", listed(absent),
                "call gpu_status for what there is, or gpu_acquire for a lease", rule="absent-device", valid=known,
                name=absent[0],
            )  # fmt: skip
        _not_apart([(name, known[name]) for name in real])
    return tuple(names)


def _not_apart(named: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Return the names, refusing devices that are in quarantine."""
    from flashrt import gpu

    apart = gpu.quarantined()
    findings = [
        Finding(
            f"argument 'devices', '{name}'", "a device that is not quarantined", apart[uuid].reason,
            f"lease others with gpu_acquire; when it is free: flashrt gpu restore {name}", rule="device-quarantined",
        )
        for name, uuid in named
        if uuid in apart
    ]  # fmt: skip
    if findings:
        raise InputError(findings)
    return tuple(name for name, _ in named)


def _is_device(name: object) -> bool:
    if not isinstance(name, str):
        return False
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    return prefix is not None and (name.removeprefix(prefix).isdigit() or is_instance(name))


@dataclass(frozen=True)
class DevicesToPlan:
    """What is known of the devices to plan for; they are numbered from 0, in the lease's order."""

    num_devices: int
    kind: Kind | None
    """None where only their number is given."""
    islands: tuple[tuple[int, ...], ...] = ()
    """Numbers that fast links join; empty: all are joined."""
    memory_bytes: int | None = None
    """Of the smallest device; None: not known."""
    names: tuple[str, ...] = ()
    """What kinds of product they are."""
    notes: tuple[str, ...] = ()


def devices_to_plan(given: int | str | Sequence[str]) -> DevicesToPlan:
    """Return the devices to plan for: a number of them, a lease's, or named ones.

    Raises
    ------
    InputError
        An ended or unknown lease, names that are no devices, or devices of several kinds.
    """
    if isinstance(given, int):
        return DevicesToPlan(given, None)
    if isinstance(given, str) and given.strip().isdecimal():
        return DevicesToPlan(int(given), None)
    from flashrt import gpu

    names = device_names(given)
    if isinstance(given, str) and given.startswith("lease"):
        devices = gpu.lease_devices(given)
    elif names and all(name.startswith("emulated-") for name in names):
        return DevicesToPlan(len(names), "emulated")
    else:
        known = {device.run_name: device for device in gpu.inventory().devices}
        devices = tuple(known[name] for name in names if name in known)
        kinds = sorted({name.partition("-")[0].partition(":")[0] for name in names})
        if len(kinds) > 1:
            raise _several_kinds(kinds)
    if not devices:
        raise InputError(
            Finding("argument 'devices'", "a number of devices, a lease id, or names", repr(given),
                    "say how many devices to plan for", rule="no-devices")
        )  # fmt: skip
    return _known_devices(devices)


def _several_kinds(kinds: Sequence[str]) -> InputError:
    return InputError(
        Finding("argument 'devices'", "devices of one kind", listed(kinds), "plan for one kind at a time",
                rule="several-kinds")
    )  # fmt: skip


def _known_devices(devices: Sequence[Device]) -> DevicesToPlan:
    members: dict[str, list[int]] = {}
    for number, device in enumerate(devices):
        members.setdefault(device.island, []).append(number)
    islands = tuple(tuple(numbers) for numbers in members.values()) if len(members) > 1 else ()
    kind, memory, notes = devices[0].kind, None, []
    if islands:
        notes.append(
            f"groups stay within the islands {[list(island) for island in islands]} of the devices' fast links; give "
            "'islands' to plan for others"
        )
    if kind in {"cuda", "rocm"}:
        free = [
            device.memory_total_bytes if device.memory_free_bytes is None else device.memory_free_bytes
            for device in devices
        ]
        memory = min((size for size in free if size is not None), default=None)
        if memory is not None:
            notes.append(f"memory: {memory} bytes, what the fullest of these devices has free; give 'memory_bytes' to "
                         "plan for other")  # fmt: skip
    if memory is None:
        notes.append(f"memory of a device of kind {kind} is not known by itself: unlimited unless 'memory_bytes' says")
    return DevicesToPlan(
        len(devices), kind, islands, memory, tuple(sorted({device.name for device in devices})), tuple(notes)
    )


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

    known = [device.run_name for device in gpu.inventory().devices if device.kind == kind]
    needed = max(numbers, default=-1) + 1
    if needed > len(known) == 0:
        raise input_error(
            f"{where}, key 'devices'", f"a kind of device that this machine has: it has no {kind} device", f"'{kind}'",
            "run it where there are some, or write devices: cpu, or devices: emulated with a profile",
            rule="too-few-devices",
        )  # fmt: skip
    if needed > len(known):
        raise input_error(
            f"{where}, key 'groups'", f"device numbers below {len(known)}: this machine has {listed(known)}",
            f"device {needed - 1}", "place it on fewer devices, or write devices: emulated with a profile",
            rule="too-few-devices",
        )  # fmt: skip
    return tuple(known[:needed])
