"""The tool and the command: files in the workspace, a program that is proved equal, refusals that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashrt.mcp_server.rendering import show
from tests.server.connection import connected
from tests.trace.cases import INPUTS
from tests.trace.refused import FAILS

pytestmark = pytest.mark.anyio
ASKED = {"where": "graph 'app'", "source": "reference.py:1", "question": "may it stream?", "choices": []}
GIVEN = {"system": "toy/reference.py:serve", "inputs": "toy/inputs.py:batches"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def workspace(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHRT_LEASE_DIR", str(tmp_path / "leases"))
    root = tmp_path / "work"
    root.mkdir()
    toy.rename(root / "toy")
    return root


async def test_a_draft_is_written_proved_and_not_replaced(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with connected(workspace) as session:
        draft = await session.finish("ir_trace", **GIVEN, count=5)
        assert draft["files"] == {kind: f"traced/toy/{file}" for kind, file in (
            ("program", "program.yaml"), ("ops", "ops.py"), ("profile", "profile.yaml"), ("questions", "questions.json")
        )}  # fmt: skip
        assert draft["operations"] == ["drift", "render"]
        for questions, begins in (
            ([], "next: flashrt interpret traced/toy/program.yaml toy/inputs.py:batches "),
            ([ASKED], "next: answer the questions in traced/toy/program.yaml, then "),
        ):
            show("ir_trace", {**draft, "questions": questions}, workspace, GIVEN)
            assert capsys.readouterr().out.splitlines()[-1].startswith(begins)
        assert draft["nodes"]["drift"]["writes"] == ["drift"]
        assert json.loads((workspace / draft["files"]["questions"]).read_text()) == draft["questions"]
        proof = await session.finish(
            "ir_interpret", program=draft["program"], inputs=GIVEN["inputs"], baseline=GIVEN["system"], count=3
        )
        assert proof["equivalent"] is True
        analysis = await session.call("analyze", program=draft["path"], profile=draft["files"]["profile"])
        assert analysis["program"] == draft["program"]
        again = await session.finish("ir_trace", **GIVEN, count=5)
        assert again["path"] == "traced/toy-2/program.yaml"
        text, _ = await session.refused("ir_trace", **GIVEN, out="traced/toy")
        assert "a folder without a draft" in text


async def test_wrong_arguments_are_all_named_before_a_job_starts(workspace: Path) -> None:
    async with connected(workspace) as session:
        text, _ = await session.refused(
            "ir_trace", system="toy/referense.py:serve", inputs="toy/input.py:batches", count=3, out="../elsewhere"
        )
        for words in ("toy/reference.py", "toy/inputs.py", "at least depth + 3, 5", "inside the workspace"):
            assert words in text
        text, _ = await session.refused("ir_trace", system="toy/program.yaml", inputs="toy/inputs.py:batches")
        assert "a reference, file.py:function" in text


async def test_a_reference_that_fails_is_named_with_its_line(workspace: Path) -> None:
    (workspace / "broken.py").write_text(FAILS)
    (workspace / "inputs.py").write_text(INPUTS)
    async with connected(workspace) as session:
        record = await session.outcome("ir_trace", system="broken.py:serve", inputs="inputs.py:batches")
    assert record["state"] == "failed"
    assert "broken.py:12" in record["error"]
    assert "raised at broken.py:6" in record["error"]


def test_the_command_prints_a_table_and_what_comes_next(workspace: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "flashrt.mcp_server", "trace", *GIVEN.values(), "--count", "5", "--workspace",
         str(workspace)], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "drift" in done.stdout
    assert "wrote traced/toy/ops.py" in done.stdout
    steps = done.stdout.partition("\nnext: ")[2].strip()
    prove = f"flashrt interpret traced/toy/program.yaml {GIVEN['inputs']} --baseline {GIVEN['system']}"
    questions = json.loads((workspace / "traced/toy/questions.json").read_text())
    assert steps == (f"answer the questions in traced/toy/program.yaml, then {prove}" if questions else prove)
