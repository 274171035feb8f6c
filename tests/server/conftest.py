"""Servers on a copy of the toy application, with leases of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

GATED = '''
"""Waits for the file `go` beside it before it is ready, and tells that it is there."""
import os
import time
from pathlib import Path

import variants

HERE = Path(__file__).parent


def serve(io):
    (HERE / "pid").write_text(str(os.getpid()))
    while not (HERE / "go").exists():
        time.sleep(0.01)
    variants.run(io)


def family(io):
    """Hangs, with a child in a session of its own."""
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    (HERE / "family.part").write_text(f"{os.getpid()} {child.pid}")
    (HERE / "family.part").replace(HERE / "family")
    io.ready()
    while True:
        time.sleep(60)
'''

PROFILE = """
schema: flashrt/profile@1
device: cpu
frames_per_batch: 6
operations: {drift: {"1": 40.0}, render: {"1": 60.0}}
transfer: {latency_ms: 0.0, gigabytes_per_s: 50}
provenance: declared
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def workspace(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The toy application with a declared profile and a system that waits; leases are apart from the machine's."""
    monkeypatch.setenv("FLASHRT_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (toy / "gated.py").write_text(GATED)
    (toy / "profile.yaml").write_text(PROFILE)
    return toy
