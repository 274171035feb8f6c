"""``flashrt init``: what it lays out validates, means its reference, and runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.server.connection import connected

COMMAND = [sys.executable, "-P", "-m", "flashrt.mcp_server"]


def init(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "init", str(folder)], capture_output=True, text=True, check=False, cwd=folder.parent
    )


@pytest.mark.anyio
async def test_a_new_application_validates_interprets_equal_and_runs(tmp_path: Path) -> None:
    folder = tmp_path / "my game"
    done = init(folder)
    assert done.returncode == 0, done.stderr
    assert not list(folder.rglob("__init__.py"))
    given: dict[str, Any] = {"inputs": "inputs.py:batches", "count": 12}
    async with connected(folder) as session:
        built = await session.call("ir_build", document="program.yaml")
        assert built["diagnostics"] == []
        proof = await session.finish("ir_interpret", program=built["program"], baseline="reference.py:serve", **given)
        assert proof["equivalent"] is True
        check = await session.finish(
            "equivalence_check", baseline="reference.py:serve", candidate="deployments/split.yaml", **given
        )
        assert check["equivalent"] is True
        analysis = await session.call("analyze", program=built["program"])
        legal = {one["id"] for one in analysis["candidates"] if one["legal"]}
        assert {"stream:think.field->draw.field", "step-pipeline:think", "disaggregate:think|draw"} <= legal
        assert json.loads(json.dumps(analysis["dependencies"]))


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "app", Path("/proc/app")):
        done = subprocess.run([*COMMAND, "init", str(folder)], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "a folder that can be written" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_folder_with_files_is_left_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "precious.txt"
    mine.parent.mkdir()
    mine.write_text("precious")
    done = init(mine.parent)
    assert done.returncode == 2
    assert "a new or empty folder" in done.stderr
    assert [path.name for path in mine.parent.iterdir()] == ["precious.txt"]
