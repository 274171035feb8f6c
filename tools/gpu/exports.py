"""The environment that makes a framework see exactly the leased devices."""

from __future__ import annotations

from collections.abc import Iterable

from flashrt.gpu.devices import Device, Kind


def environment(devices: Iterable[Device], lease: str = "", token: int | None = None) -> dict[str, str]:
    """Return the variables to export before the first framework import of a process.

    CUDA numbers devices by speed unless told ``PCI_BUS_ID``, which is also NVML's order. On AMD only the ROCR mask
    is set: a HIP mask on top of it would be applied to the devices that are left.
    """
    indices: dict[Kind, list[str]] = {}
    for device in devices:
        indices.setdefault(device.kind, []).append(str(device.index))
    joined = {kind: ",".join(numbers) for kind, numbers in indices.items()}
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
