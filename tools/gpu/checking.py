"""Whether a device is free again: its memory is back at the baseline, and a probe of it passes.

Lists of processes decide nothing, because in a container they may be the host's: they are evidence only. CPU cores and
emulated devices have nothing that could stay behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from flashrt.errors import Finding, InputError, input_error, listed
from flashrt.gpu.devices import Device, Kind
from flashrt.gpu.exports import environment
from flashrt.gpu.inventory import take_inventory
from flashrt.gpu.lease_directory import LeaseDirectory
from flashrt.gpu.quarantine import RESTORE, Quarantine, lift, put_away, quarantined

PROBED: tuple[Kind, ...] = ("cuda", "rocm")
CHECK_LIMIT = "FLASHRT_CHECK_LIMIT_S"
_DEFAULT_LIMIT_S = 30.0
_SETTLE_SHARE = 1 / 6
"""Of that time, what memory has to come back."""
_TOLERANCE_BYTES = 256 << 20
_KILLED_S = 2.0


def limit_s() -> float:
    """Return how long one look at a device may take; ``FLASHRT_CHECK_LIMIT_S`` sets it."""
    with suppress(ValueError):
        return max(0.1, float(os.environ.get(CHECK_LIMIT, _DEFAULT_LIMIT_S)))
    return _DEFAULT_LIMIT_S


@dataclass(frozen=True)
class Checkup:
    """What a look at one device gave.

    Parameters
    ----------
    reason
        Why it is not free; empty where it is.
    used_bytes
        Memory in use, None where the driver does not tell.
    """

    device: Device
    reason: str = ""
    used_bytes: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)


def needs_check(devices: Iterable[Device]) -> list[Device]:
    """Return those of the devices on which something could have been left."""
    return [device for device in devices if device.kind in PROBED]


def memory_in_use(devices: Sequence[Device]) -> dict[str, int | None]:
    """Return the memory in use of the GPUs among the devices, by UUID: the baseline that has to come back."""
    found = look_over(devices, {}, probe=False)
    return {checkup.device.uuid: checkup.used_bytes for checkup in found}


def look_over(devices: Sequence[Device], baselines: Mapping[str, int | None], *, probe: bool = True) -> list[Checkup]:
    """Look at the GPUs among the devices, all at once, each from a process of its own that is always ended.

    Parameters
    ----------
    baselines
        By UUID, the memory that was in use before; None or absent: memory is not judged.
    probe
        Also compute something there.
    """
    limit = limit_s()
    started = []
    for device in needs_check(devices):
        baseline = baselines.get(device.uuid)
        allowed = None if baseline is None else baseline + _tolerance_bytes(device)
        order = {
            "uuid": device.uuid, "kind": device.kind, "limit_bytes": allowed, "settle_s": limit * _SETTLE_SHARE,
            "probe": probe, "parent": os.getpid(),
        }  # fmt: skip
        started.append((device, baseline, allowed, order, _start(device)))
    deadline = time.monotonic() + limit
    # The orders come last: each begins only when all have been started, and their limit is one.
    for _, _, _, order, process in started:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
    return [
        _judge(device, baseline, allowed, *_finish(process, deadline, limit))
        for device, baseline, allowed, _, process in started
    ]


def _tolerance_bytes(device: Device) -> int:
    share = _TOLERANCE_BYTES if device.memory_total_bytes is None else device.memory_total_bytes // 100
    return min(_TOLERANCE_BYTES, share)


def _start(device: Device) -> subprocess.Popen[str]:
    variables = {**os.environ, **environment([device])}
    # Masks of the process that asks may hide the device.
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name not in environment([device]):
            variables.pop(name, None)
    variables.pop("FLASHRT_LEASE", None)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "flashrt.gpu.probe"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables,
    )  # fmt: skip


def _finish(process: subprocess.Popen[str], deadline: float, limit: float) -> tuple[dict[str, Any], str]:
    """Return what a probe has said, and how it ended where it did not end well; it is gone afterwards."""
    ending = ""
    try:
        said, _ = process.communicate(timeout=max(0.05, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        ending = f"the device probe gave no answer within {limit:g} s and was killed"
        process.kill()
        try:
            said, _ = process.communicate(timeout=_KILLED_S)
        except subprocess.TimeoutExpired:
            said, ending = "", f"{ending}, but hangs in the driver and cannot be ended"
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode and not ending:
        code = process.returncode
        words = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        ending = f"the device probe ended with {words}"
    found: dict[str, Any] = {}
    for line in (said or "").splitlines():
        with suppress(ValueError):
            found |= json.loads(line)
    return found, ending


def _judge(device: Device, baseline: int | None, allowed: int | None, found: Mapping[str, Any], ending: str) -> Checkup:
    used = found.get("used_bytes")
    reasons = []
    if "lost" in found:
        reasons.append(f"the driver does not answer for it: {found['lost']}")
    if used is not None and allowed is not None and used > allowed:
        reasons.append(f"{used} bytes of its memory are in use, {baseline} were before")
    if found.get("probe") is False:
        reasons.append(f"the device probe failed: {found.get('error')}")
    if ending:
        reasons.append(ending)
    evidence = {
        "used_bytes": used, "baseline_bytes": baseline, "processes": found.get("processes", []),
        "probe": ending or ("passed" if found.get("probe") else found.get("error") or found.get("note") or "not made"),
    }  # fmt: skip
    return Checkup(device, "; ".join(reasons), used, evidence)


def keep_apart(checkups: Iterable[Checkup], *, lease: str = "", holder: str = "") -> list[Quarantine]:
    """Quarantine the devices that are not free, and return their records."""
    return [
        put_away(
            Quarantine(
                checkup.device.uuid, checkup.device.kind, checkup.reason, checkup.evidence, lease=lease, holder=holder
            )
        )
        for checkup in checkups
        if checkup.reason
    ]


def restore(name: str, *, accept_memory: bool = False) -> Checkup:
    """Look a quarantined device over again, and let it be leased if it is free.

    Parameters
    ----------
    name
        Its UUID, or what runs call it.
    accept_memory
        Take the memory that is in use now for its baseline.

    Raises
    ------
    InputError
        It is not quarantined, is still leased, or is still not free: then it stays, with the new evidence.
    """
    apart = quarantined()
    devices = {one.uuid: one for one in take_inventory().devices}
    uuid = next((one.uuid for one in devices.values() if one.run_name == name), name)
    where = f"{RESTORE} {name}"
    if uuid not in apart:
        raise input_error(
            where, f"a quarantined device ({listed(apart)})", "one that is not quarantined", "call gpu_status",
            rule="not-quarantined", valid=apart, name=name,
        )  # fmt: skip
    device, record = devices.get(uuid), apart[uuid]
    if device is None:
        raise input_error(
            where, "a device that the driver lists", "one that it does not list",
            "repair the device or its driver, and call again", rule="device-lost",
        )  # fmt: skip
    directory = LeaseDirectory()
    with directory.exclusive():
        lock = directory.lock_device(uuid)
    if lock is None:
        raise input_error(
            where, "a device that nobody holds", "one that is leased or being looked over",
            "wait for its lease to end (gpu_status), and call again", rule="device-leased",
        )  # fmt: skip
    try:
        baseline = record.evidence.get("baseline_bytes")
        checkups = look_over([device], {uuid: None if accept_memory else baseline})
        # Only GPUs are ever put away by what is here; a core is free at once.
        checkup = checkups[0] if checkups else Checkup(device)
        if checkup.reason:
            put_away(
                replace(record, reason=checkup.reason, evidence={**checkup.evidence, "baseline_bytes": baseline}),
                anew=True,
            )
            raise InputError(_still_bad(where, checkup))
        directory.clear_mark(uuid)
        lift(uuid)
    finally:
        os.close(lock)
    return checkup


def _still_bad(where: str, checkup: Checkup) -> Finding:
    processes = [f"{entry['pid']} ({entry['name'] or 'not visible from here'})"
                 for entry in checkup.evidence["processes"]]  # fmt: skip
    seen = f"; the driver names process {', '.join(processes)} there" if processes else ""
    return Finding(
        where, "memory back at its baseline and a probe that passes", f"{checkup.reason}{seen}",
        "end what uses it, or have the device repaired, and call again; --accept-memory takes the memory in use for "
        "its baseline", rule="not-free",
    )  # fmt: skip
