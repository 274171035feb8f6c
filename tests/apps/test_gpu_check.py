"""The check for GPUs, dry: the same systems, deployments and comparisons on CPU cores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashrt.analysis import read_deployment
from flashrt.ir import build_file
from flashrt.mcp_server.demo import applications
from tests.packaging.test_sources import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # type: ignore[import-not-found]


@pytest.mark.slow
def test_a_dry_run_passes(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    done = subprocess.run(
        [sys.executable, "-P", ROOT / "scripts" / "gpu_check.py", "--dry", "--only", "omni", "--json", table],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(table.read_text())
    (row,) = record["rows"]
    assert (record["device"], row["app"], row["equal"], row["close"]) == ("cpu", "omni", True, True)
    assert row["reference_ms"] > 0
    assert row["split_ms"] > 0


@pytest.mark.parametrize("name", list(applications()))
def test_each_application_s_cut_is_a_deployment_and_its_medium_configuration_one(name: str) -> None:
    folder = applications()[name]
    built = build_file(folder / "program.yaml")
    config = {**gpu_check.MEDIUM[name], "dtype": "bfloat16"}
    document: dict[str, Any] = gpu_check.cut(folder, gpu_check.CUTS[name], config, dry=False)
    placement = read_deployment(document, built)
    assert set(placement.devices.values()) == {(0,), (1,)}


def test_rounding_is_close_and_another_picture_is_not() -> None:
    random = np.random.default_rng(0)
    frames = random.integers(10, 240, (4, 8, 8, 3)).astype(np.uint8)
    sound = random.standard_normal(1000).astype(np.float32) * 0.1
    near = {"frames": frames + 1, "sound": sound + 1e-4}
    assert gpu_check.close({"frames": frames, "sound": sound}, near)
    assert not gpu_check.close({"frames": frames, "sound": sound}, {"frames": frames[::-1], "sound": sound})
    assert not gpu_check.close({"sound": sound}, {"sound": sound[::-1]})
    assert not gpu_check.close({"sound": sound}, {"sound": sound[1:]})
