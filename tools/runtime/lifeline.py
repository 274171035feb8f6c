"""What ties processes together: none outlives the one it works for, and none is mistaken for another."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path

from flashrt.runtime.janitor import SHM, remove_files

MARK = "FLASHRT_SYSTEM"
"""Environment variable that all processes of one system under test carry, wherever they move to."""
PR_SET_PDEATHSIG = 1
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""Settings of glibc for processes that run operations: memory that a batch has used is kept for the next.

Without them, tens of megabytes go back to the kernel and come again, page by page, in every batch.
"""
MAX_SWEEPS = 20


def inherited_descriptor(number: int) -> int:
    """Take over an inherited descriptor; return its new number.

    It moves to a high number, so that user code which closes or reuses low descriptors by accident does not hit it, and
    is not inherited further.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError):
        high = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, min(512, limit // 2))
        os.close(number)
        number = high
    os.set_inheritable(number, False)
    return number


def inherited_socket(number: int) -> socket.socket:
    """Take over an inherited socket; see `inherited_descriptor`."""
    return socket.socket(fileno=inherited_descriptor(number))


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when its parent thread dies; end at once when it has died already.

    Only for parents that start processes from a thread which lives as long as they do.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def end_system() -> None:
    """End every process of the system that this one belongs to, this one last; for when nobody is left to serve."""
    mark = os.environ.get(MARK)
    if mark:
        kill_marked(mark, keep=os.getpid())
        remove_files(shared_name(mark))
        # The group is the system's own only where its leader carries the mark; else it is that of a shell, say.
        if f"{MARK}={mark}".encode() in _environment(os.getpgrp()):
            os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(0)


def shared_name(mark: str | None = None) -> str:
    """Return what a system's files in /dev/shm are called after ``flashrt-``; by default this process's system."""
    mark = os.environ.get(MARK, "") if mark is None else mark
    return mark[:12] or f"pid{os.getpid()}"


def remove_orphans() -> None:
    """Remove the files in /dev/shm of systems that have no process any more."""
    for name in {path.name.split("-")[1] for path in SHM.glob("flashrt-*-*")} - {shared_name()}:
        number = name.removeprefix("pid")
        alive = Path(f"/proc/{number}").exists() if number.isdigit() else bool(marked(name))
        if not alive:
            remove_files(name)


def marked(mark: str) -> list[int]:
    """Return the ids of live processes that carry a system's mark in their environment."""
    needle = f"{MARK}={mark}".encode()
    return [number for number in _all_processes() if needle in _environment(number)]


def kill_marked(mark: str, keep: int = 0) -> None:
    """Kill every process that carries a mark, until no new one appears."""
    for _ in range(MAX_SWEEPS):
        found = [number for number in marked(mark) if number != keep]
        killed = [_kill_if_marked(number, mark) for number in found]
        if not any(killed):
            return


def _kill_if_marked(number: int, mark: str) -> bool:
    # The descriptor holds on to one process: its number may belong to another by the time the signal goes.
    try:
        descriptor = os.pidfd_open(number)
    except OSError:
        return False
    try:
        if f"{MARK}={mark}".encode() not in _environment(number):
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(number: int) -> bytes:
    # A process that has ended but was not reaped has none.
    try:
        return Path(f"/proc/{number}/environ").read_bytes()
    except OSError:
        return b""


def descendants(number: int) -> list[int]:
    """Return a process and all below it, by what the kernel says of its children: cheap enough to ask often."""
    found = [number]
    for parent in found:
        try:
            tasks = os.listdir(f"/proc/{parent}/task")
        except OSError:
            continue
        for task in tasks:
            with suppress(OSError):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text().split()
                found += [int(child) for child in children]
    return found


def resident_bytes(number: int) -> int:
    """Return the memory that a process has in use, or 0 when it has ended."""
    try:
        return int(Path(f"/proc/{number}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def wait_exit(descriptor: int, timeout_s: float) -> bool:
    """Return whether the process behind a pidfd has ended, waiting up to `timeout_s`; it is not reaped."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


def exit_words(code: int) -> str:
    """Return what an exit status as `subprocess` gives it says: ``signal SIGKILL``, ``exit status 3``."""
    if code < 0:
        with suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
        return f"signal {-code}"
    return f"exit status {code}"


def current_place() -> str:
    """Return where this process's main thread is now: the innermost line that is not FlashRT's or Python's own."""
    number = threading.main_thread().ident
    frame = sys._current_frames().get(number) if number is not None else None
    if frame is None:
        return ""
    stack = traceback.extract_stack(frame)
    ours, library = str(Path(__file__).parents[1]), str(Path(threading.__file__).parent)
    theirs = [f for f in stack if not f.filename.startswith((ours, library, "<"))]
    chosen = theirs[-1] if theirs else stack[-1]
    return f"{Path(chosen.filename).name}:{chosen.lineno} in {chosen.name}"
