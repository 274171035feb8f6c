"""Every test has a lease directory of its own, and leaves no keeper behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flashrt.gpu.processes import ProcessIdentity
from tests.gpu.contention import keepers_of


def poll_until(condition: Callable[[], object], deadline_s: float = 60.0) -> None:
    """Return when `condition()` holds; fail when it does not within a generous deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s"
        time.sleep(0.005)


@pytest.fixture
def wait_until() -> Callable[..., None]:
    return poll_until


@pytest.fixture(autouse=True)
def lease_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = tmp_path / "leases"
    monkeypatch.setenv("FLASHRT_LEASE_DIR", str(directory))
    monkeypatch.setenv("FLASHRT_EMULATED_DEVICES", "6")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield directory
    try:
        poll_until(lambda: not keepers_of(directory))
    finally:
        for keeper in keepers_of(directory):
            keeper.kill()


@pytest.fixture
def keepers(lease_directory: Path) -> Callable[[], list[ProcessIdentity]]:
    return lambda: keepers_of(lease_directory)
