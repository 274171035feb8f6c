"""The environment that makes a framework see exactly the leased devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flashrt.errors import input_error, listed
from flashrt.gpu.devices import Device, Kind


def environment(devices: Iterable[Device], lease: str = "", token: int | None = None) -> dict[str, str]:
    """Return the variables to export before the first framework import of a process.

    CUDA numbers devices by speed unless told ``PCI_BUS_ID``, which is also NVML's order. On AMD only the ROCR mask
    is set: a HIP mask on top of it would be applied to the devices that are left. MIG instances go by UUID, because
    they have no index; CUDA shows a process the first of them only, so a process takes one each.
    """
    masks: dict[Kind, list[str]] = {}
    for device in devices:
        masks.setdefault(device.kind, []).append(device.mask)
    joined = {kind: ",".join(names) for kind, names in masks.items()}
    variables = {"FLASHRT_LEASE": lease}
    if token is not None:
        variables["FLASHRT_LEASE_TOKEN"] = str(token)
    if "cuda" in joined:
        variables |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": joined["cuda"]}
    if "rocm" in joined:
        variables["ROCR_VISIBLE_DEVICES"] = joined["rocm"]
    if "cpu" in joined:
        variables |= {"FLASHRT_CPUS": joined["cpu"], "OMP_NUM_THREADS": "1"}
    if "emulated" in joined:
        variables["FLASHRT_EMULATED"] = joined["emulated"]
    return variables


def is_instance(name: str) -> bool:
    """Return whether a device of a run is a MIG instance: ``cuda:MIG-…``."""
    return name.startswith("cuda:MIG-")


def mask_devices(names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return what to export so that a process sees only these devices, and what it then calls them.

    Parameters
    ----------
    names
        As runs call devices: ``cuda:3``, ``cuda:MIG-…``, ``rocm:1``, ``cpu-0``, ``emulated-2``; one kind.

    Returns
    -------
    (variables, names within the mask): a masked process numbers its GPUs from 0. Others keep their names.

    Raises
    ------
    InputError
        Several MIG instances, of which CUDA would show the process the first only.
    """
    numbers = [name.split(":", 1)[1] for name in names if ":" in name]
    if not numbers:
        return {}, list(names)
    if len(numbers) > 1 and any(is_instance(name) for name in names):
        raise input_error(
            "devices of one process", "one MIG instance, or whole GPUs: CUDA shows a process one instance only",
            listed(names), "place one operation group an instance in a deployment, or lease whole GPUs",
            rule="several-instances",
        )  # fmt: skip
    kind = names[0].split(":", 1)[0]
    inside = [f"{kind}:{position}" for position in range(len(numbers))]
    if kind == "rocm":
        return {"ROCR_VISIBLE_DEVICES": ",".join(numbers)}, inside
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(numbers)}, inside
