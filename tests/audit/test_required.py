"""What the analysis makes of audits: candidates say what they rest on, and audits can be required."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ir.documents import edge, flat_graph
from tests.server.connection import connected

from . import programs
from .test_whole import write

pytestmark = pytest.mark.anyio

PROFILE: dict[str, Any] = {
    "schema": "flashrt/profile@1", "device": "emulated", "operations": {"u": 5.0, "v": 4.0}, "provenance": "declared",
}  # fmt: skip


async def test_candidates_say_what_they_rest_on_and_audits_can_be_required(tmp_path: Path) -> None:
    case = programs.Case("streams", u=programs.COUNT, states=programs.S, reads=programs.READ, writes=programs.WRITE,
                         chunks=3)  # fmt: skip
    folder = write(tmp_path, case.document(), case.ops())
    (folder / "profile.yaml").write_text(yaml.safe_dump(PROFILE))
    plan = {"program": "program.yaml", "profile": "profile.yaml", "devices": 2, "require_audit": True}
    async with connected(folder) as session:
        before = await session.call("analyze", program="program.yaml")
        assert before["audit"] is None
        assert not any(one["audited"] for one in before["candidates"])
        cut = next(one for one in before["candidates"] if one["id"] == "disaggregate:u|v")
        assert cut["unaudited"] == {"states:u": "unchecked", "states:v": "unchecked"}
        stream = next(one for one in before["candidates"] if one["id"] == "stream:u.y->v.x")
        assert "stream:u.y -> v.x" in stream["rests_on"]
        text, record = await session.refused("plan_deployment", **plan)
        assert "call ir_audit" in text
        assert [one["rule"] for one in record["diagnostics"]] == ["not-audited"]

        audit = await session.finish("ir_audit", program="program.yaml", inputs="inputs.py:batches", count=3)
        assert audit["clean"]
        after = await session.call("analyze", program="program.yaml")
        assert after["audit"] == audit["audit"]
        assert all(one["audited"] for one in after["candidates"] if one["legal"])
        assert (await session.finish("plan_deployment", **plan))["front"]

        with (folder / "ops.py").open("a") as file:
            file.write("\nCHANGED = True\n")
        # Other code: the audit says nothing of it.
        assert (await session.call("analyze", program="program.yaml"))["audit"] is None
        await session.refused("plan_deployment", **plan)


async def test_a_refuted_claim_is_named_and_refused(tmp_path: Path) -> None:
    case = programs.Case("lies", setup="last = 0.0", u='nonlocal last\nlast += 1\nreturn {"y": inputs["x"] + last}')
    folder = write(tmp_path, case.document(), case.ops())
    (folder / "profile.yaml").write_text(yaml.safe_dump(PROFILE))
    split = {"schema": "flashrt/deployment@1", "program": "program.yaml", "groups": {"a": [0], "b": [1]},
             "place": {"u": "a", "v": "b"}, "devices": "cpu"}  # fmt: skip
    (folder / "split.yaml").write_text(yaml.safe_dump(split))
    plan = {"program": "program.yaml", "profile": "profile.yaml", "devices": 2}
    async with connected(folder) as session:
        audit = await session.finish("ir_audit", program="program.yaml", inputs="inputs.py:batches", count=3)
        assert [one["kind"] for one in audit["findings"] if one["severity"] == "error"] == ["hidden-attribute"]
        text, record = await session.refused("plan_deployment", **plan, require_audit=True)
        assert "refuted: 'states:u'" in text
        assert [one["rule"] for one in record["diagnostics"]] == ["refuted-claim"]
        assert (await session.finish("plan_deployment", **plan))["front"]
        found = await session.call("analyze", program="program.yaml")
        cut = next(one for one in found["candidates"] if one["id"] == "disaggregate:u|v")
        assert cut["unaudited"] == {"states:u": "refuted"}
        variant = await session.call(
            "variant_add", hypothesis="h", transformation="t", bottleneck="b", legality="l", system="split.yaml"
        )
        given = {"variant": variant["variant"], "state": "measured", "equivalence": "eq-0", "run": "run-0"}
        text, _ = await session.refused("variant_update", **given, require_audit=True)
        assert "refuted: 'states:u'" in text
        text, _ = await session.refused("variant_update", **given)
        assert "refuted" not in text


async def test_wrong_arguments_of_an_audit_come_back_at_once(tmp_path: Path) -> None:
    document = flat_graph({"u": {"op": "u"}}, [edge("x", "u.x"), edge("u.y", "y")])
    folder = write(tmp_path, document, "def load(context):\n    return {}\n")
    async with connected(folder) as session:
        text, _ = await session.refused("ir_audit", program="program.yaml", inputs="input.py:batches")
        assert "inputs.py" in text
        text, _ = await session.refused("ir_audit", program="program.yaml", inputs="inputs.py:batches", count=1)
        assert "count" in text
    assert json.dumps(document)
