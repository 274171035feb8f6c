"""Profiles through a real client and server: measured, used, and refused once something has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.server.connection import connected

pytestmark = pytest.mark.anyio

SPLIT: dict[str, Any] = {
    "schema": "flashrt/deployment@1", "program": "program.yaml", "groups": {"a": [0], "b": [1]},
    "place": {"drift": "a", "render": "b"},
}  # fmt: skip
RUN = {"inputs": "inputs.py:batches", "runs": 1, "duration_s": 0.5, "warmup": 1}


async def test_a_measured_profile_is_used_until_the_code_changes(workspace: Path) -> None:
    async with connected(workspace) as session:
        program = (await session.call("ir_build", document="program.yaml"))["program"]
        text, record = await session.refused(
            "profile_measure", program=program, inputs="inputs.py:absent.py", degrees=[4], devices=["cpu-0"]
        )
        # Both mistakes at once.
        assert "inputs" in text
        assert any(one["rule"] == "degrees" for one in record["diagnostics"])
        measured = await session.finish("profile_measure", program=program, inputs=RUN["inputs"], count=3)
        document = json.loads((workspace / measured["path"]).read_text())
        assert document["operations"].keys() == document["samples"].keys() == {"drift", "render"}
        assert document["key"]["files"].keys() == {"toy_ops.py"}
        assert measured["notes"] == document["notes"]
        profile = measured["profile"]
        (workspace / "deployment.yaml").write_text(yaml.safe_dump({**SPLIT, "devices": "cpu", "profile": profile}))
        found = await session.call("analyze", program=program, profile=profile, deployment="deployment.yaml")
        assert found["t_min_ms"] > 0
        run = await session.finish("bench_run", system="deployment.yaml", **RUN)
        assert run["fps"] > 0

        text, _ = await session.refused("bench_run", system="deployment.yaml", config={"delay_s": 0.1}, **RUN)
        assert "option 'delay_s'" in text
        with (workspace / "toy_ops.py").open("a") as file:
            file.write("\nCHANGED = True\n")
        program = (await session.call("ir_build", document="program.yaml"))["program"]
        for tool, arguments in (
            ("analyze", {"program": program, "profile": profile}),
            ("bench_run", {"system": "deployment.yaml", **RUN}),
            (
                "equivalence_check",
                {"baseline": "reference.py:serve", "candidate": "deployment.yaml", "inputs": RUN["inputs"]},
            ),
        ):
            text, record = await session.refused(tool, **arguments)
            assert "file 'toy_ops.py'" in text, tool
            assert "call profile_measure again" in text
            assert [one["rule"] for one in record["diagnostics"]] == ["stale-profile"]
