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


def hide(paths: Sequence[str]) -> dict[str, Any]:
    """Hide files from this process and all that it starts; return the guard's record.

    In a mount namespace of its own (root, or a user namespace) another file lies over each; where the host allows
    none, an audit hook refuses to open them in this process.
    """
    if not paths:
        return {"kind": "guard", "name": "reference-hidden", "active": False, "how": "there is no file to hide"}
    problem = _enter_namespace()
    if problem is None:
        problem = _cover(paths)
    if problem is None:
        return {"kind": "guard", "name": "reference-hidden", "active": True, "how": "mount namespace"}
    _watch_opens({os.path.realpath(path) for path in paths})
    how = f"audit hook in the first process only: no mount namespace ({problem})"
    return {"kind": "guard", "name": "reference-hidden", "active": True, "how": how}


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
            if libc.mount(stub.name.encode(), os.fsencode(path), None, MS_BIND, None) != 0:
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
