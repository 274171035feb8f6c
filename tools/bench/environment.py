"""Where a measurement was made, so that it can be believed and repeated."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Any

from flashrt.analysis.profile_key import package_versions, processor_name


def describe_environment(devices: Sequence[str]) -> dict[str, Any]:
    """Return host, kernel, packages, load and devices, as they are now."""
    packages = {name: number for name, number in package_versions().items() if name != "python"}
    return {
        "devices": list(devices),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1m": os.getloadavg()[0],
        "packages": packages,
        "emulated": any(name.startswith("emulated") for name in devices),
    }
