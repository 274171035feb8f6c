"""The demonstration from the command line: the whole loop, its table, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from rich.console import Console
from rich.progress import Progress

from flashrt import gpu
from flashrt.mcp_server.client import started_server
from flashrt.mcp_server.demo import LEASE_TTL_S, _Loop, applications
from flashrt.mcp_server.demo_plan import read_plan


def run_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FLASHRT_LEASE_DIR": str(folder / "leases")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "flashrt.mcp_server", "demo", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_loop_on_an_application(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "omni", "--quick", "--json", "demo.json")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "demo.json").read_text())
    assert record["may_stop"]
    assert record["emulated"] is False
    measured = [row for row in record["variants"] if row["state"] == "measured"]
    removed = [row for row in record["variants"] if row["state"] == "removed"]
    assert len(measured) >= 2
    assert all(row["equal"] and row["evidence"]["equivalence"] and row["evidence"]["run"] for row in measured)
    assert all(row["legality"] and row["figures"]["fps"] > 0 and row["predicted"]["fps"] > 0 for row in measured)
    assert all(row["reason"] for row in removed)
    assert all(row["ratio"] > 0 for row in measured)
    plots = list((tmp_path / "demo" / "omni" / ".flashrt").rglob("plot.png"))
    assert len(plots) >= len(measured) + 1
    leases = tmp_path / "leases"
    assert not [path for path in leases.rglob("*.json") if "lease" in path.name]


def test_an_unknown_application_is_refused_with_the_nearest(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "worldplya")
    assert done.returncode == 2
    assert "did you mean 'worldplay'" in done.stderr


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "demo" / "worldplay" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    done = run_demo(tmp_path, "worldplay")
    assert done.returncode == 2
    assert "other files" in done.stderr
    assert mine.read_text() == "precious"


def test_a_demonstration_that_takes_long_keeps_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHRT_LEASE_DIR", str(tmp_path / "leases"))
    workspace = tmp_path / "workspace"
    workspace.mkdir()

    async def run() -> list[bool]:
        renewed = []
        async with started_server(workspace) as caller:
            with Progress(console=Console(quiet=True)) as progress:
                loop = _Loop(caller, read_plan(applications()["omni"]), progress, Console(quiet=True), quick=True)
                lease = await loop.acquire()
                for passed_s in (0.0, LEASE_TTL_S / 2):
                    loop.renewed_s -= passed_s
                    await loop.call("variant_list", "a step")
                    renewed.append(bool(gpu.check(lease).last_request))
                await caller.call("gpu_release", {"lease": lease})
        return renewed

    assert anyio.run(run) == [False, True]
    assert not gpu.holders()
