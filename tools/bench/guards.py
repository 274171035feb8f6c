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


def hide(reference: Sequence[str], private: Sequence[str]) -> list[dict[str, Any]]:
    """Hide files and folders from this process and all that it starts; return the guards' records.

    In a mount namespace of its own (root, or a user namespace) others lie over them, and the right to take these away
    is given up. Where the host allows none, an audit hook refuses to open files of the reference in this process.
    """
    problem = _enter_namespace() or _cover([*reference, *private]) if reference or private else None
    found = []
    for name, paths in (("reference-hidden", reference), ("records-hidden", private)):
        active, how = True, "mount namespace"
        if not paths:
            active, how = False, "there is nothing to hide"
        elif problem is not None and paths is reference:
            _watch_opens({os.path.realpath(path) for path in paths})
            how = f"audit hook, in the first process only: no mount namespace ({problem})"
        elif problem is not None:
            active, how = False, f"no mount namespace ({problem})"
        found.append({"kind": "guard", "name": name, "active": active, "how": how})
    return found


def _enter_namespace() -> str | None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) == 0:
        return None
    user, group = os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
        return os.strerror(ctypes.get_errno())
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
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
            if failed:
                return os.strerror(ctypes.get_errno())
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
