"""The keeper: a process of ours that holds the locks of one lease, for as long as the lease lasts and no longer.

It reads an order on standard input, queues, takes the devices, writes the record and answers on standard output.
When the acquirer confirms the answer, the keeper cuts all ties to it: the acquirer may be restarted, the lease stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from flashrt.errors import FlashrtError, ResourceMissingError
from flashrt.gpu.checking import keep_apart, limit_s, look_over, needs_check
from flashrt.gpu.handshake import Acquirer, AcquirerGoneError
from flashrt.gpu.lease_directory import LeaseDirectory
from flashrt.gpu.processes import boottime_ns
from flashrt.gpu.quarantine import quarantined
from flashrt.gpu.taking import Busy, Holding, Order, note_baselines, queue_and_take

HEARTBEAT_S = 1.0


def guard(directory: LeaseDirectory, holding: Holding) -> str:
    """Keep the lease until it ends, and return why it ended."""
    poll = select.poll()
    poll.register(holding.control, select.POLLIN)
    holder = holding.lease.holder_process
    pidfd: int | None = None
    if holder is not None:
        try:
            pidfd = holder.open_pidfd()
        except ProcessLookupError:
            return "its holder's process died"
        if pidfd is not None:
            poll.register(pidfd, select.POLLIN)
    # Without a pidfd the holder is looked up, often enough that its death is noticed within a second.
    beat_s = HEARTBEAT_S if holder is None or pidfd is not None else HEARTBEAT_S / 4
    while True:
        left_s = (holding.lease.expires_ns - boottime_ns()) / 1e9
        if left_s <= 0:
            return f"its time ran out ({holding.lease.ttl_s:g} s)"
        if not _beat(directory, holding):
            return "its record was removed"
        ready = {descriptor for descriptor, _ in poll.poll(min(beat_s, left_s) * 1000 + 1)}
        if pidfd in ready or (holder is not None and pidfd is None and not holder.runs()):
            return "its holder's process died"
        if holding.control in ready and _obey(directory, holding):
            return "released"


def _beat(directory: LeaseDirectory, holding: Holding) -> bool:
    """Mark record and locks as in use; False when the record is not ours any more."""
    now = boottime_ns()
    # In time since boot, like all times that decide something; it also keeps cleaners of old files away (by ctime).
    for descriptor in (holding.record, *holding.devices):
        os.utime(descriptor, ns=(now, now))
    try:
        seen = os.stat(directory.record_path(holding.lease.lease))
    except OSError:
        return False
    own = os.fstat(holding.record)
    return (seen.st_dev, seen.st_ino) == (own.st_dev, own.st_ino)


def _obey(directory: LeaseDirectory, holding: Holding) -> bool:
    """Carry out the requests in the control pipe; True when asked to release."""
    for line in os.read(holding.control, 65536).splitlines():
        try:
            message = json.loads(line)
            if message["token"] != holding.lease.token:
                continue
            if message["do"] == "release":
                return True
            if message["do"] == "renew":
                _renew(directory, holding, float(message["ttl_s"]), str(message["request"]))
        except (ValueError, KeyError, TypeError):
            # Not from `leases`, which writes whole lines: the sender sees that nothing happened.
            continue
    return False


def _renew(directory: LeaseDirectory, holding: Holding, ttl_s: float, request: str) -> None:
    lease = replace(holding.lease, ttl_s=ttl_s, expires_ns=boottime_ns() + int(ttl_s * 1e9), last_request=request)
    try:
        with directory.exclusive(timeout_s=1.0):
            record = directory.publish(directory.record_path(lease.lease), lease.as_record())
    except (FlashrtError, OSError):
        # The sender hears that the renewal did not happen; the lease stays as it was.
        return
    os.close(holding.record)
    holding.lease, holding.record = lease, record


def look_over_devices(
    directory: LeaseDirectory, holding: Holding, reason: str, baselines: Mapping[str, int | None]
) -> None:
    """End the lease for its holder at once, then see whether its GPUs are free, and quarantine those that are not."""
    lease = holding.lease
    used = needs_check(lease.devices)
    if not used:
        return
    ended = replace(lease, ended=reason, expires_ns=boottime_ns() + int((limit_s() + 5.0) * 1e9))
    # Without a record of it (the folder is gone, the mutex stuck) the devices are looked over all the same.
    with contextlib.suppress(FlashrtError, OSError):
        with directory.exclusive(timeout_s=1.0):
            record = directory.publish(directory.record_path(lease.lease), ended.as_record())
        os.close(holding.record)
        holding.lease, holding.record = ended, record
        directory.remember(ended, reason)
    already = quarantined()
    checkups = look_over([device for device in used if device.uuid not in already], baselines)
    keep_apart(checkups, lease=lease.lease, holder=lease.holder)
    with contextlib.suppress(OSError):
        for device in used:
            directory.clear_mark(device.uuid)


def let_go(directory: LeaseDirectory, holding: Holding, reason: str) -> None:
    """End the lease: devices first, record last, so that a record never says less than the locks."""
    for descriptor in holding.devices:
        os.close(descriptor)
    # The folder may have been removed under us: then there is nothing to tidy, and the lease has ended all the same.
    with contextlib.suppress(OSError):
        if not holding.lease.ended:
            directory.remember(holding.lease, reason)
        directory.control_path(holding.lease.lease).unlink(missing_ok=True)
        if _beat(directory, replace(holding, devices=())):
            directory.record_path(holding.lease.lease).unlink(missing_ok=True)
    os.close(holding.record)


def main() -> None:
    """Serve one lease from order to end."""
    acquirer = Acquirer()
    try:
        fields = json.loads(acquirer.read_line())
        directory = LeaseDirectory(Path(fields["directory"]))
        order = Order.from_dict(fields)
        acquirer.watch(order.acquirer)
        result = queue_and_take(directory, order, acquirer)
        if isinstance(result, Busy):
            acquirer.answer({"busy": result.as_dict()})
            return
        baselines = note_baselines(directory, result.lease)
    except AcquirerGoneError:
        return
    except ResourceMissingError as error:
        with contextlib.suppress(AcquirerGoneError):
            acquirer.answer({"missing": str(error), "retry_after_s": error.retry_after_s})
        return
    except Exception:  # noqa: BLE001 - handed to the acquirer, which raises it with its text
        with contextlib.suppress(AcquirerGoneError):
            acquirer.answer({"fault": traceback.format_exc()})
        return
    try:
        acquirer.answer({"granted": result.lease.as_record()})
        acquirer.confirm()
        acquirer.cut_ties()
        reason = guard(directory, result)
    except AcquirerGoneError:
        reason = "the acquirer died before it had the answer"
    try:
        look_over_devices(directory, result, reason, baselines)
    finally:
        let_go(directory, result, reason)


if __name__ == "__main__":
    main()
