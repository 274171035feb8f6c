"""Where a measurement was made, so that it can be believed and repeated."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("flashrt", "torch", "numpy", "diffusers", "transformers")


def describe_environment(devices: Sequence[str]) -> dict[str, Any]:
    """Return host, kernel, packages, load and devices, as they are now."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "devices": list(devices),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average_1m": os.getloadavg()[0],
        "packages": packages,
        "emulated": any(name.startswith("emulated") for name in devices),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return platform.processor()
