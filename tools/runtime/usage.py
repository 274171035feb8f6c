"""What a process has used, as it says itself."""

from __future__ import annotations

import resource
import sys
from typing import Any


def process_usage() -> dict[str, Any]:
    """Return this process's peak memory: host bytes and, where torch used a device, device bytes."""
    found: dict[str, Any] = {"peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        devices = range(torch.cuda.device_count())
        found["peak_device_bytes"] = max(torch.cuda.max_memory_allocated(index) for index in devices)
    return found
