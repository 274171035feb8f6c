"""The processes of a job: found by its mark and by descent, wherever they moved to, and ended without remainder."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from flashrt.variants.owners import Owner

if TYPE_CHECKING:
    from flashrt.gpu.processes import ProcessIdentity

MARK = "FLASHRT_JOB"
_LOOK_S = 0.01
_TRACKER_S = 0.75
_TRACKER = "multiprocessing.resource_tracker"


def marked(job: str) -> set[ProcessIdentity]:
    """Return the running processes that carry the job's mark in their environment, this one apart."""
    from flashrt.gpu.processes import ProcessIdentity

    needle = f"{MARK}={job}".encode()
    found = set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry.name}/environ", "rb") as file:
                carries = needle in file.read().split(b"\0")
        except OSError:
            continue
        identity = ProcessIdentity.of(int(entry.name)) if carries else None
        if identity is not None:
            found.add(identity)
    return found


def descendants(pid: int) -> set[ProcessIdentity]:
    """Return the running processes below `pid`, also those in sessions of their own."""
    import psutil

    from flashrt.gpu.processes import ProcessIdentity

    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return set()
    return {identity for child in children if (identity := ProcessIdentity.of(child.pid)) is not None}


def kill_all(find: Callable[[], Iterable[ProcessIdentity]], timeout_s: float) -> bool:
    """Kill what `find` returns until it returns nothing; return whether that came to be in time."""
    from flashrt.gpu.processes import command_line

    start = time.monotonic()
    while processes := list(find()):
        waited_s = time.monotonic() - start
        for process in processes:
            # These remove shared memory when those they serve are gone, and then leave by themselves.
            if waited_s < min(timeout_s / 2, _TRACKER_S) and _TRACKER in command_line(process.pid):
                continue
            # Another user's process cannot be one of ours.
            with suppress(PermissionError):
                process.kill()
        if waited_s > timeout_s:
            return False
        time.sleep(_LOOK_S)
    return True


def signal_group(leader: Owner, number: signal.Signals) -> None:
    """Send a signal to the process group of a running leader; nothing when it runs no more."""
    if leader.is_visible() and leader.identity().runs():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, number)


def wait_gone(owner: Owner, timeout_s: float) -> bool:
    """Return whether the process has ended, after at most `timeout_s` seconds."""
    if owner.is_gone():
        return True
    if not owner.is_visible():
        time.sleep(max(0.0, timeout_s))
        return False
    try:
        descriptor = owner.identity().open_pidfd()
    except ProcessLookupError:
        return True
    if descriptor is None:
        time.sleep(max(0.0, min(timeout_s, _LOOK_S)))
        return owner.is_gone()
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(max(0.0, timeout_s) * 1000))
    finally:
        os.close(descriptor)
