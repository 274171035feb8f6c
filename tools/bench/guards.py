"""What keeps a candidate from taking a short cut, set up in its own process before any of its code runs.

Each guard says whether it is active and how; a verdict repeats that. The clock, the seeds, the expected values and the
verdict are in another process anyway.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashrt.bench.systems import System

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
CAP_SYS_ADMIN, CAPABILITY_VERSION, PR_CAPBSET_DROP = 21, 0x20080522, 24
PR_SET_DUMPABLE = 4
STORE = ".flashrt"
"""Folder of a workspace that FlashRT keeps its own files in."""
STUB = (
    "raise ImportError('the reference is hidden from the systems that are compared with it: a candidate does its own "
    "work; copy what it needs into a file of its own')\n"
)
TIMERS = ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "sleep")
_TRUE_TIMERS = {name: getattr(time, name) for name in TIMERS}


def reference_files(candidate: System, baseline: System | None) -> list[Path]:
    """Return the files to hide from a candidate: the reference's own, and copies of it among the candidate's files.

    Only code is compared with code in this way: the operations of a program may well be the reference's functions.
    Where both are in one file there is nothing to hide it from.
    """
    if baseline is None or baseline.kind != "code" or candidate.kind != "code":
        return []
    if candidate.path.resolve() == baseline.path.resolve():
        return []
    content = baseline.path.read_bytes()
    copies = (candidate.root or candidate.path.parent) / baseline.path.name
    found = {baseline.path.resolve()}
    if copies.is_file() and copies.resolve() != candidate.path.resolve() and copies.read_bytes() == content:
        found.add(copies.resolve())
    return sorted(found)


def private_files(workspace: Path) -> list[Path]:
    """Return where the workspace keeps verdicts, and the logs and recordings of jobs: nothing that a system needs."""
    store = workspace / STORE
    return [path for path in (*sorted(store.glob("*.db*")), store / "jobs") if path.exists()]


def hide(reference: Sequence[str], private: Sequence[str], harness: int | None = None) -> list[dict[str, Any]]:
    """Hide files and folders from this process and all that it starts, and the harness; return the guards' records.

    In a mount namespace of its own others lie over the files, and the right to take these away is given up. In a user
    namespace of its own it is nobody that may read or trace the harness's process, root included; who owns files stays
    as it is. Where the host allows neither, an audit hook refuses to open files of the reference in this process.

    Parameters
    ----------
    harness
        The process that has clock, seeds and verdict.
    """
    wanted = bool(reference or private or harness)
    problem = _enter_namespaces() if wanted else None
    covered = problem or (_cover([*reference, *private]) if reference or private else None)
    found = []
    for name, paths in (("reference-hidden", reference), ("records-hidden", private)):
        active, how = True, "mount namespace"
        if not paths:
            active, how = False, "there is nothing to hide"
        elif covered is not None and paths is reference:
            _watch_opens({os.path.realpath(path) for path in paths})
            how = f"audit hook, in the first process only: no mount namespace ({covered})"
        elif covered is not None:
            active, how = False, f"no mount namespace ({covered})"
        found.append({"kind": "guard", "name": name, "active": active, "how": how})
    if harness is not None:
        active = not _may_read(harness)
        how = "user namespace" if active and problem is None else "the kernel refuses"
        if not active:
            how = f"its memory can be read: no user namespace ({problem or 'it does not help here'})"
        found.append({"kind": "guard", "name": "harness-out-of-reach", "active": active, "how": how})
    return found


def _may_read(number: int) -> bool:
    """Return whether this process may read another one's memory."""
    try:
        with open(f"/proc/{number}/mem", "rb"):
            return True
    except OSError:
        return False


def _enter_namespaces() -> str | None:
    """Enter a user and a mount namespace of this process's own; return why the host allows none.

    All ids stay what they are where that is allowed (root), else the process's own. A mapping of more than one has to
    be written by a process that is still outside.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.geteuid(), os.getegid()
    own, waits, tells = os.getpid(), *os.pipe()
    writer = os.fork() if user == 0 else None
    if writer == 0:
        os.close(tells)
        # An end of file: the namespace is there, or there is none to write for.
        os.read(waits, 1)
        os._exit(0 if _map_all(own) is None else 1)
    os.close(waits)
    failed = libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0
    problem = os.strerror(ctypes.get_errno()) if failed else None
    os.close(tells)
    mapped = writer is not None and os.waitpid(writer, 0)[1] == 0
    if problem is None and not mapped:
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        except OSError as error:
            problem = str(error)
    if problem is None:
        # What a change of rights takes away: this process's own files in /proc.
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        return None
    return None if failed and libc.unshare(CLONE_NEWNS) == 0 else problem


def _map_all(number: int) -> str | None:
    """Let a process's new user namespace have all ids that there are here, unchanged."""
    try:
        for name in ("uid_map", "gid_map"):
            ranges = [line.split() for line in Path(f"/proc/self/{name}").read_text().splitlines()]
            text = "".join(f"{first} {first} {count}\n" for first, _, count in ranges)
            Path(f"/proc/{number}/{name}").write_text(text)
    except OSError as error:
        return str(error)
    return None


def _cover(paths: Sequence[str]) -> str | None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) != 0:
        return os.strerror(ctypes.get_errno())
    with tempfile.NamedTemporaryFile("w", suffix=".py") as stub:
        stub.write(STUB)
        stub.flush()
        os.chmod(stub.name, 0o444)
        for path in paths:
            target = os.fsencode(path)
            if os.path.isdir(path):
                failed = libc.mount(b"tmpfs", target, b"tmpfs", 0, b"size=64k")
            else:
                failed = libc.mount(stub.name.encode(), target, None, MS_BIND, None)
            problem = os.strerror(ctypes.get_errno()) if failed else None
            # The database's journal comes and goes with its connections: what has gone needs no hiding.
            if problem is not None and os.path.exists(path):
                return problem
    return _give_up_mounting(libc)


class _CapabilityHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapabilityData(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _give_up_mounting(libc: Any) -> str | None:
    """Drop CAP_SYS_ADMIN for good, so that what was covered stays covered."""
    header, data = _CapabilityHeader(CAPABILITY_VERSION, 0), (_CapabilityData * 2)()
    if libc.capget(ctypes.byref(header), data) != 0:
        return os.strerror(ctypes.get_errno())
    for name in ("effective", "permitted", "inheritable"):
        setattr(data[0], name, getattr(data[0], name) & ~(1 << CAP_SYS_ADMIN))
    # Of the bounding set first, which takes the very right that is given up, so that no program gets it back.
    libc.prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0)
    if libc.capset(ctypes.byref(header), data) != 0:
        return os.strerror(ctypes.get_errno())
    return None


def _watch_opens(hidden: set[str]) -> None:
    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and os.path.realpath(arguments[0]) in hidden:
            raise ImportError(STUB.partition("'")[2].rpartition("'")[0])

    sys.addaudithook(refuse)


def replaced_timers() -> list[str]:
    """Return which timers the system has put others in place of, where it left them so."""
    return [f"time.{name}" for name, function in _TRUE_TIMERS.items() if getattr(time, name, None) is not function]


def judge_guards(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what the guards saw a system do."""
    names = sorted({str(event["text"]) for event in events if event["kind"] == "replaced"})
    return [
        f"the system replaced {name}: no clock of its own counts, and an honest one has no need to" for name in names
    ]


def guard_records(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return each guard's record; the first that came counts, because it came before any code of the system."""
    found: dict[str, Any] = {}
    for event in events:
        if event["kind"] == "guard":
            found.setdefault(str(event["name"]), {"active": event["active"], "how": event["how"]})
    return found
