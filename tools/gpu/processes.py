"""Other processes, told apart by number *and* start time: a process number is used again, the pair is not."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


def boottime_ns() -> int:
    """Return nanoseconds since boot, sleep included; setting the wall clock does not move it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the name of this boot of the machine; empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Return the name of this process's PID namespace; numbers mean nothing outside of it."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return "unknown"


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the state on (the command before it may hold blanks)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of this boot: its number and its start time in clock ticks since boot."""

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the identity of a running process, or None when there is none (a zombie does not run)."""
        fields = _stat_fields(pid)
        if fields is None or fields[0] in "ZX":
            return None
        return cls(pid, int(fields[19]))

    def runs(self) -> bool:
        """Say whether this very process still runs."""
        return ProcessIdentity.of(self.pid) == self

    def open_pidfd(self) -> int | None:
        """Return a descriptor that becomes readable when the process ends; None where the kernel has none.

        Raises
        ------
        ProcessLookupError
            It no longer runs.
        """
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            raise
        except OSError:
            if not self.runs():
                raise ProcessLookupError(self.pid) from None
            return None
        if not self.runs():
            os.close(descriptor)
            raise ProcessLookupError(self.pid)
        return descriptor

    def kill(self) -> None:
        """Send SIGKILL to this process and to no other that may have got its number; gone already is fine."""
        try:
            descriptor = self.open_pidfd()
            if descriptor is None:
                os.kill(self.pid, signal.SIGKILL)
                return
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)
        except ProcessLookupError:
            return


def parent_of(pid: int) -> int | None:
    """Return the parent's number, or None when the process is not visible."""
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[1])


def command_line(pid: int) -> str:
    """Return the command line with blanks between arguments; empty when not visible."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def environment_value(pid: int, name: str) -> str | None:
    """Return one variable of the environment a process started with, where it may be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = name.encode() + b"="
    return next((entry[len(prefix) :].decode(errors="replace") for entry in entries if entry.startswith(prefix)), None)
