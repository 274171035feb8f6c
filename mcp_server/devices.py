"""What the arguments ``devices`` and ``degrees`` of a tool mean."""

from __future__ import annotations

from collections.abc import Sequence

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
    bad = [name for name in names if not _is_device(name)]
    if bad:
        raise input_error(
            "argument 'devices'", "a lease id, or names such as cpu-0, cuda:0, emulated-0", listed(bad),
            "call gpu_acquire and pass its lease", rule="unknown-device",
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


def check_degrees(degrees: Sequence[int] | None) -> None:
    """Refuse degrees that cannot be measured: operations run on one device each here.

    Raises
    ------
    InputError
        Any degree but 1.
    """
    if degrees and list(degrees) != [1]:
        raise input_error(
            "argument 'degrees'", "[1]: operations are measured on one device", str(list(degrees)),
            "leave it out, and declare other degrees in the profile by hand", rule="degrees",
        )  # fmt: skip
