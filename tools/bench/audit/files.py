"""Which files an op writes and reads while it runs, told by Python's audit events and by what lies in the folder."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

MAX_KEPT_BYTES = 16 << 20
SYSTEM = ("/proc", "/sys", "/dev")
CACHES = ("__pycache__", ".cache", "site-packages", "torchinductor", "triton")


class Unknown(Enum):
    """Stands for content that nobody has."""

    NOT_KEPT = "too large to keep, or changed before anybody looked: such files are left alone"


@dataclass
class FileUse:
    """What one operation did with files."""

    written: set[str] = field(default_factory=set)
    read_back: set[str] = field(default_factory=set)
    """Read after an op had written it."""


class FileWatch:
    """Watches the files that are opened while an operation runs; one for each process, set up before user code."""

    def __init__(self, folder: Path) -> None:
        self.uses: dict[str, FileUse] = {}
        self.before: dict[str, Any] = {}
        """File that an op wrote -> the bytes that it held before; None: it was not there; or `Unknown.NOT_KEPT`."""
        self._folder = folder
        self._current: str | None = None
        self._apart = (*SYSTEM, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sys.prefix + "/lib")
        self._stamps: dict[str, tuple[int, int]] = {}
        self._busy = False
        sys.addaudithook(self._hook)

    def start(self) -> None:
        """Note what lies in the program's folder now; what changes from here on was changed by the ops."""
        self._stamps = dict(self._stamped())

    def _stamped(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            if path.is_file():
                found = path.stat()
                yield str(path.resolve()), (found.st_mtime_ns, found.st_size)

    @contextmanager
    def during(self, operation: str) -> Iterator[None]:
        """Count what happens inside for `operation`."""
        before, self._current = self._current, operation
        try:
            yield
        finally:
            self._current = before

    def settle(self, operation: str) -> None:
        """Count files of the folder that changed without an event, which native code wrote, for `operation`."""
        now = dict(self._stamped())
        for name, stamp in now.items():
            if self._stamps.get(name) != stamp and name not in self.before and not self._ignored(name):
                self.before[name] = Unknown.NOT_KEPT if name in self._stamps else None
                self.uses.setdefault(operation, FileUse()).written.add(name)
        self._stamps = now

    def _ignored(self, name: str) -> bool:
        parts = Path(name).parts
        return name.startswith(self._apart) or name.endswith(".pyc") or any(part in parts for part in CACHES)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._current is None or self._busy or event not in {"open", "sqlite3.connect", "os.rename"}:
            return
        subject = arguments[1] if event == "os.rename" else arguments[0]
        if not isinstance(subject, str | bytes | os.PathLike):
            return
        self._busy = True
        try:
            name = os.path.realpath(os.fsdecode(subject))
            if self._ignored(name):
                return
            reads, writes = True, True
            if event == "os.rename":
                reads = False
            elif event == "open":
                reads, writes = _modes(arguments[1], arguments[2])
            use = self.uses.setdefault(self._current, FileUse())
            if reads and name in self.before:
                use.read_back.add(name)
            if writes:
                use.written.add(name)
                if name not in self.before:
                    self.before[name] = _content(name)
        except OSError:
            return
        finally:
            self._busy = False


def _modes(mode: Any, flags: Any) -> tuple[bool, bool]:
    if isinstance(mode, str):
        return "r" in mode or "+" in mode, bool(set(mode) & set("wax+"))
    access = (flags or 0) & os.O_ACCMODE
    return access != os.O_WRONLY, access != os.O_RDONLY


def _content(name: str) -> Any:
    if not os.path.lexists(name):
        return None
    if not os.path.isfile(name) or os.path.getsize(name) > MAX_KEPT_BYTES:
        return Unknown.NOT_KEPT
    with open(name, "rb") as file:
        return file.read()


@contextmanager
def replaced(name: str, content: bytes | None) -> Iterator[None]:
    """Let a file hold something else, or be absent, for a while; it is moved aside meanwhile, never removed."""
    path, aside = Path(name), Path(f"{name}.aside-{os.getpid()}")
    if path.exists():
        path.rename(aside)
    try:
        if content is not None:
            path.write_bytes(content)
        yield
    finally:
        path.unlink(missing_ok=True)
        if aside.exists():
            aside.rename(path)
