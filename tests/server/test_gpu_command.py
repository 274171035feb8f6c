"""``flashrt gpu`` and the gpu tools: what people and agents see of shared devices."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashrt import gpu
from flashrt.errors import InputError, ResourceMissingError
from flashrt.gpu.quarantine import Quarantine, put_away
from flashrt.mcp_server.devices import device_names
from flashrt.mcp_server.tools import Tools
from flashrt.mcp_server.workspace import Workspace
from tests.conftest import interruptible, wait_until

COMMAND = [sys.executable, "-P", "-m", "flashrt.mcp_server", "gpu"]


@pytest.fixture(autouse=True)
def leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FLASHRT_LEASE_DIR", str(tmp_path / "leases"))
    monkeypatch.setenv("FLASHRT_EMULATED_DEVICES", "2")
    yield
    for lease in gpu.holders():
        gpu.release(lease)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "COLUMNS": "160"},
    )  # fmt: skip


def test_the_table_and_its_json_name_who_holds_what_and_why() -> None:
    lease = gpu.acquire(1, "alice", kind="emulated", purpose="a profile")
    shown = run("--once")
    assert shown.returncode == 0, shown.stderr
    row = next(line for line in shown.stdout.splitlines() if "emulated-0" in line)
    assert "leased" in row
    assert "alice for a profile" in row
    assert "s left" in row
    assert "no GPU here" in shown.stdout or "cuda" in shown.stdout or "rocm" in shown.stdout
    status = json.loads(run("--json").stdout)
    states = {device["run_name"]: device["state"] for device in status["devices"]}
    assert (states["emulated-0"], states["emulated-1"]) == ("leased", "free")
    assert status["leases"][0]["lease"] == lease.lease


def test_the_table_is_refreshed_until_it_is_interrupted() -> None:
    main, side = pty.openpty()
    process = subprocess.Popen(COMMAND, stdin=side, stdout=side, stderr=side, start_new_session=True)
    os.close(side)
    said = b""
    try:
        while b"emulated-1" not in said:
            said += os.read(main, 4096)
        assert b"late-comer" not in said
        gpu.acquire(1, "late-comer", kind="emulated")
        while b"late" not in said:
            said += os.read(main, 4096)
        os.kill(process.pid, signal.SIGINT)
        while process.poll() is None:
            try:
                os.read(main, 4096)
            except OSError:
                break
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(main)


def test_an_interrupted_wait_for_a_device_ends_at_once_and_leaves_the_queue() -> None:
    first = gpu.acquire(2, "alice", kind="emulated")
    process = interruptible("gpu", "acquire", "1", "bob", "--kind", "emulated", "--wait-s", "25")
    try:
        wait_until(lambda: bool(gpu.status()["waiting"]), "bob in the queue")
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=100)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert "interrupted" in said
    wait_until(lambda: not gpu.status()["waiting"], "an empty queue")
    gpu.release(first.lease)
    assert not gpu.holders()


def test_restore_wants_a_device_that_is_quarantined() -> None:
    assert run("restore").returncode == 2
    refused = run("restore", "cpu-0")
    assert refused.returncode == 2
    assert "not quarantined" in refused.stderr


def test_a_quarantined_device_is_shown_and_refused_for_measuring() -> None:
    core = f"cpu-{min(os.sched_getaffinity(0))}"
    evidence = {"processes": [{"pid": 7, "name": None}], "baseline_bytes": 5}
    put_away(Quarantine(core, "cpu", "left in use", evidence, holder="alice"))
    shown = run("--once").stdout
    assert f"{core} is quarantined since" in shown
    assert "last held by alice; the driver names 7 (not visible from here) there" in shown
    assert f"flashrt gpu restore {core}" in shown
    with pytest.raises(InputError, match=f"left in use.*flashrt gpu restore {core}"):
        device_names([core])
    assert gpu.status()["quarantined"][0]["evidence"] == evidence


def test_the_tools_queue_say_who_holds_what_and_what_is_quarantined(tmp_path: Path) -> None:
    tools = Tools(Workspace(tmp_path))
    lease = tools.gpu_acquire(2, "alice", kind="emulated", ttl_s=50)
    assert lease["names"] == ["emulated-0", "emulated-1"]
    with pytest.raises(ResourceMissingError, match=r"alice holds.*s at the latest if nobody renews.*wait_s"):
        tools.gpu_acquire(1, "bob", kind="emulated")
    short = tools.gpu_renew(lease["lease"], 1)
    assert short["remaining_s"] <= 1
    served = tools.gpu_acquire(1, "bob", kind="emulated", wait_s=20)
    assert tools.gpu_release(served["lease"]) == {
        "released": served["lease"], "devices": ["emulated-0"], "quarantined": [],
    }  # fmt: skip


def test_without_a_gpu_the_refusal_is_kind(tmp_path: Path) -> None:
    kinds = {device["kind"] for device in gpu.status()["devices"]}
    kind = next(kind for kind in ("rocm", "cuda") if kind not in kinds)
    with pytest.raises(InputError, match="none here; leave kind out to lease CPU cores"):
        gpu.acquire(1, "alice", kind=kind)  # type: ignore[arg-type]
