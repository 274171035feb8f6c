"""Fixtures for all tests: no process of ours outlives a test, and nothing stays in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from flashrt.runtime.lifeline import marked, shared_name

MARK = "FLASHRT_TEST_SESSION"
# As systems under test have it: else bits depend on where values lie in memory. Read by MKL when torch is first used.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
TOY = Path(__file__).parent / "toy"
# Which examples are tried does not change from run to run, and none fails for the time that it took: a process that is
# not scheduled for a while is slow at anything. Others: --hypothesis-profile=default --hypothesis-seed=1.
settings.register_profile(
    "flashrt", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("flashrt")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    """Return once `condition` holds; fail with `what` when it does not in time, however starved the machine is."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not in {timeout_s} s: {what}")
        time.sleep(0.01)


def interruptible(*arguments: str) -> subprocess.Popen[str]:
    """Start ``flashrt`` so that SIGINT reaches it; programs of a shell's background inherit to ignore it."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from flashrt.mcp_server.cli import main; sys.exit(main())"
    )
    line = [sys.executable, "-P", "-c", code, *arguments]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def pytest_configure(config: pytest.Config) -> None:
    """Mark this session's environment, so that its processes are told from others of this machine.

    Sessions that share the work have a mark each: what one has running is no leftover of the other.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ[MARK] = uuid.uuid4().hex
    os.environ.setdefault(MARK, uuid.uuid4().hex)


def flashrt_processes() -> set[int]:
    """Return the processes of this test session that run a module of ours, wherever they have moved to."""
    found = set()
    needle = f"{MARK}={os.environ[MARK]}".encode()
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        command = process.info["cmdline"] or []
        ours = any(part.startswith("flashrt.") for part in command)
        if not ours or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        try:
            if needle in Path(f"/proc/{process.pid}/environ").read_bytes():
                found.add(process.pid)
        except OSError:
            continue
    return found


def own_memory() -> set[str]:
    """Return what the deployments of this process have in shared memory; other tests run beside this one."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"flashrt-{shared_name()}-")}


def unowned_memory() -> set[str]:
    """Return what is in shared memory and belongs to no live system."""
    found = set()
    for name in os.listdir("/dev/shm"):
        owner = name.split("-")[1] if name.startswith("flashrt-") else ""
        number = owner.removeprefix("pid")
        if not owner or not (Path(f"/proc/{number}").exists() if number.isdigit() else marked(owner)):
            found.add(name)
    return found


@pytest.fixture(autouse=True)
def the_search_path_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give back what a command that runs in this process takes off the search path; spawned processes need it."""
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(autouse=True)
def no_process_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process of ours behind."""
    before = flashrt_processes()
    yield
    wait_until(lambda: not flashrt_processes() - before, f"processes of {request.node.name} to end", 60)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A workspace with a small application: NumPy only, so that its processes start fast."""
    import shutil

    folder = tmp_path / "toy"
    shutil.copytree(TOY, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder
