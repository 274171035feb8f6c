"""Looks one GPU over, in a process of its own: a driver that hangs or crashes takes this process along and no other.

The order comes as one JSON object on standard input; what is found goes to standard output as JSON lines, each as soon
as it is known: first the memory in use and the processes, then what a small computation on the device gave. The mask in
the environment shows this device alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from flashrt.gpu.devices import DeviceProcess

_POLL_S = 0.1
_PR_SET_PDEATHSIG = 1
_PATTERN = 0x5A5A5A5A
_NUM_BYTES = 1 << 20


def main() -> None:
    """Carry out one order."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    order = json.loads(sys.stdin.readline())
    if os.getppid() != order["parent"]:
        return
    try:
        settle(order)
    except Exception as error:  # noqa: BLE001 - each binding has errors of its own; whatever it says is evidence
        say({"lost": f"{error or type(error).__name__}"})
        return
    if order["probe"]:
        say(compute(order["kind"]))


def say(found: dict[str, Any]) -> None:
    """Write one line at once, so that it is known even if the next step ends this process."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def settle(order: dict[str, Any]) -> None:
    """Read the memory in use until it is down at the limit, or until the time for that is over; say it."""
    if order["kind"] == "cuda":
        from flashrt.gpu import nvidia

        with nvidia.opened_nvml() as (nvml, errors):
            _wait(order, lambda: nvidia.read_use(nvml, errors, order["uuid"]))
    else:
        from flashrt.gpu import amd

        with amd.opened_amdsmi() as (smi, errors):
            _wait(order, lambda: amd.read_use(smi, errors, order["uuid"]))


def _wait(order: dict[str, Any], read: Callable[[], tuple[int | None, Sequence[DeviceProcess]]]) -> None:
    deadline = time.monotonic() + order["settle_s"]
    limit = order["limit_bytes"]
    while True:
        used, processes = read()
        if used is None or limit is None or used <= limit or time.monotonic() >= deadline:
            say({"used_bytes": used, "processes": [process.as_dict() for process in processes]})
            return
        time.sleep(_POLL_S)


def compute(kind: str) -> dict[str, Any]:
    """Fill memory on the device, copy it there and back, and compare."""
    names = ("libcuda.so.1",) if kind == "cuda" else ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")
    library = next((found for found in map(_load, names) if found is not None), None)
    if library is None:
        return {"probe": None, "note": f"nothing was computed: {names[0]} cannot be loaded"}
    try:
        (_cuda if kind == "cuda" else _hip)(library)
    except (AttributeError, RuntimeError) as error:
        return {"probe": False, "error": str(error)}
    return {"probe": True}


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _caller(library: ctypes.CDLL) -> Callable[..., None]:
    def call(function: str, *arguments: Any) -> None:
        status = getattr(library, function)(*arguments)
        if status != 0:
            raise RuntimeError(f"{function} failed with status {status}")

    return call


def _cuda(library: ctypes.CDLL) -> None:
    call, size = _caller(library), ctypes.c_size_t(_NUM_BYTES)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    first, second = ctypes.c_uint64(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(first), size)
    call("cuMemAlloc_v2", ctypes.byref(second), size)
    call("cuMemsetD32_v2", first, ctypes.c_uint(_PATTERN), ctypes.c_size_t(_NUM_BYTES // 4))
    call("cuMemcpyDtoD_v2", second, first, size)
    call("cuCtxSynchronize")
    back = ctypes.create_string_buffer(_NUM_BYTES)
    call("cuMemcpyDtoH_v2", back, second, size)
    _compare(back)
    call("cuMemFree_v2", first)
    call("cuMemFree_v2", second)
    call("cuDevicePrimaryCtxRelease_v2", device)


def _hip(library: ctypes.CDLL) -> None:
    call, size = _caller(library), ctypes.c_size_t(_NUM_BYTES)
    first, second = ctypes.c_void_p(), ctypes.c_void_p()
    call("hipSetDevice", 0)
    call("hipMalloc", ctypes.byref(first), size)
    call("hipMalloc", ctypes.byref(second), size)
    call("hipMemset", first, _PATTERN & 0xFF, size)
    call("hipMemcpy", second, first, size, 3)
    call("hipDeviceSynchronize")
    back = ctypes.create_string_buffer(_NUM_BYTES)
    call("hipMemcpy", back, second, size, 2)
    _compare(back)
    call("hipFree", first)
    call("hipFree", second)


def _compare(back: ctypes.Array[ctypes.c_char]) -> None:
    wrong = _NUM_BYTES - back.raw.count(_PATTERN & 0xFF)
    if wrong:
        raise RuntimeError(f"{wrong} of {_NUM_BYTES} bytes came back wrong from its memory")


if __name__ == "__main__":
    main()
