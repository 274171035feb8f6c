"""Fixtures for all tests: no process of ours outlives a test, and nothing stays in shared memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

TOY = Path(__file__).parent / "toy"


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30) -> None:
    """Return once `condition` holds; fail with `what` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not in {timeout_s} s: {what}")
        time.sleep(0.01)


def flashrt_processes() -> set[int]:
    """Return the processes of this user that run a module of ours."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        command = process.info["cmdline"] or []
        if any(part.startswith("flashrt.") for part in command) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.add(process.pid)
    return found


@pytest.fixture(autouse=True)
def no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process of ours behind."""
    before = flashrt_processes()
    shared = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    yield
    wait_until(lambda: not flashrt_processes() - before, f"processes of {request.node.name} to end", 10)
    if os.path.isdir("/dev/shm"):
        assert not {name for name in set(os.listdir("/dev/shm")) - shared if "flashrt" in name}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A workspace with a small application: NumPy only, so that its processes start fast."""
    import shutil

    folder = tmp_path / "toy"
    shutil.copytree(TOY, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder
