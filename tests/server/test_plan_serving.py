"""``plan_serving`` through a real server, and ``flashrt plan-serving`` at the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.connection import connected

pytestmark = pytest.mark.anyio

NAME = "qwen-vl-like"


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "flashrt.mcp_server", "plan-serving", *arguments], cwd=folder,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture
def documents(workspace: Path) -> dict[str, Any]:
    done = command("--examples", ".", folder=workspace)
    assert done.returncode == 0, done.stderr
    return {
        "model": f"{NAME}/model.yaml", "workload": f"{NAME}/half-images.yaml", "profile": f"{NAME}/profile.yaml",
        "devices": 4, "time_limit_s": 2,
    }  # fmt: skip


async def test_a_plan_comes_with_why_pictures_and_a_run(workspace: Path, documents: dict[str, Any]) -> None:
    async with connected(workspace) as session:
        found = await session.finish("plan_serving", **documents, emulate_requests=200, speedup=8)
        plan = found["plan"]
        assert plan["gpus"] <= 4
        assert plan["goodput_per_s"] == pytest.approx(sum(one["goodput_per_s"] for one in plan["types"].values()))
        assert (found["provenance"], found["figures"]) == ("declared", "predicted")
        assert found["why"]["bottleneck"]
        assert found["emulated_run"]["emulated"] is True
        assert found["emulated_run"]["goodput_per_s"] > 0
        for path in found["artifacts"].values():
            assert (workspace / path).is_file()
        deployment = yaml.safe_load((workspace / found["artifacts"]["deployment"]).read_text())
        assert deployment["schema"] == "flashrt/serving-deployment@1"
        least = await session.finish(
            "plan_serving", **documents, policy="least_gpus", goodput_per_s=0.3 * plan["goodput_per_s"]
        )
        assert least["plan"]["gpus"] < 4


async def test_all_that_is_wrong_is_said_at_once(workspace: Path, documents: dict[str, Any]) -> None:
    path = workspace / NAME / "half-images.yaml"
    workload = yaml.safe_load(path.read_text())
    workload["types"]["text"]["fraction"] = 0.2
    workload["types"]["text"]["components"] = ["decoder"]
    path.write_text(yaml.safe_dump(workload))
    async with connected(workspace) as session:
        text, _ = await session.refused("plan_serving", **{**documents, "restriction": "mono", "device": "x"})
        assert "a sum of 1, got 0.7" in text
        assert "did you mean 'decode'" in text
        assert "did you mean 'monolithic'" in text
        text, _ = await session.refused("plan_serving", **{**documents, "model": "absent.yaml"})
        assert "absent.yaml" in text


def test_the_command_plans_writes_and_refuses(workspace: Path, documents: dict[str, Any]) -> None:
    files = [str(documents[name]) for name in ("model", "workload", "profile")]
    done = command(*files, "--devices", "4", "--time-limit-s", "2", "--restriction", "monolithic", "--out", "out",
                   folder=workspace)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "image_encoder + prefill + decode" in " ".join(done.stdout.split())
    record = json.loads((workspace / "out" / "plan.json").read_text())
    assert record["counts"]["simple_subplans_served"] == 2
    again = command("--examples", ".", folder=workspace)
    assert again.returncode != 0
    assert "already" in again.stderr or "none of the documents" in again.stderr
    assert "MODEL WORKLOAD PROFILE" in command(files[0], folder=workspace).stderr
