"""Jobs on a workspace of their own; after each test nothing of them runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flashrt.gpu.processes import ProcessIdentity, command_line
from flashrt.mcp_server.jobs import Job, start_job, wait_job


def poll_until(condition: Callable[[], object], deadline_s: float = 30.0) -> None:
    """Return when `condition()` holds; fail when it does not within a generous deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s"
        time.sleep(0.01)


def running(workspace: Path) -> list[int]:
    """Return the job processes of this workspace that run."""
    return [
        int(entry)
        for entry in os.listdir("/proc")
        if entry.isdecimal() and str(workspace) in command_line(int(entry)) and ProcessIdentity.of(int(entry))
    ]


@pytest.fixture
def until() -> Callable[..., None]:
    return poll_until


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    folder = tmp_path / "workspace"
    folder.mkdir()
    yield folder
    poll_until(lambda: not running(folder))


@pytest.fixture
def start(workspace: Path) -> Callable[..., str]:
    """Start a job that runs a function of `job_fixtures`; returns its id."""

    def run(name: str, **arguments: Any) -> str:
        return start_job(workspace, "bench_run", arguments, function=f"job_fixtures:{name}")

    return run


@pytest.fixture
def finish(workspace: Path) -> Callable[[str], Job]:
    """Wait until a job has finished."""

    def run(job: str) -> Job:
        found = wait_job(workspace, job, 60)
        assert found.is_final, found
        return found

    return run


@pytest.fixture
def pids(workspace: Path) -> Callable[[], list[ProcessIdentity]]:
    """Wait for what `family` writes; returns its processes, the job's own first."""

    def read() -> list[ProcessIdentity]:
        poll_until((workspace / "pids").exists)
        found = [ProcessIdentity.of(int(pid)) for pid in (workspace / "pids").read_text().split()]
        assert None not in found
        return [identity for identity in found if identity is not None]

    return read
