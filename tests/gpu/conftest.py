"""Every test has a lease directory of its own, and leaves no keeper behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashrt.gpu.processes import ProcessIdentity, command_line, environment_value


def poll_until(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    """Return when `condition()` holds; fail when it does not within a generous deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s"
        time.sleep(0.005)


@pytest.fixture
def wait_until() -> Callable[..., None]:
    return poll_until


def keepers_of(directory: Path) -> list[ProcessIdentity]:
    """Return the running keepers that were started with this lease directory."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and "flashrt.gpu.keeper" in command_line(int(entry)):
            identity = ProcessIdentity.of(int(entry))
            if identity and environment_value(int(entry), "FLASHRT_LEASE_DIR") == str(directory):
                found.append(identity)
    return found


@pytest.fixture(autouse=True)
def lease_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = tmp_path / "leases"
    monkeypatch.setenv("FLASHRT_LEASE_DIR", str(directory))
    monkeypatch.setenv("FLASHRT_EMULATED_DEVICES", "6")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield directory
    try:
        poll_until(lambda: not keepers_of(directory), 5.0)
    finally:
        for keeper in keepers_of(directory):
            keeper.kill()


@pytest.fixture
def keepers(lease_directory: Path) -> Callable[[], list[ProcessIdentity]]:
    return lambda: keepers_of(lease_directory)
