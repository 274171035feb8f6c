"""What an agent sees first: the list of tools, against a golden copy."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.server.connection import connected, raw_server

pytestmark = pytest.mark.anyio

GOLDEN = Path(__file__).parent / "golden" / "tools.json"
REFRESH = "FLASHRT_REFRESH_GOLDEN"
MAX_TOOLS = 24
MAX_CHARACTERS = 40_000
"""`make check` counts tokens, of which there may be 10,000."""
# As interfaces.md has them, those that exist so far.
NAMES = {
    "ir_build", "ir_interpret", "analyze", "profile_measure", "plan_deployment", "equivalence_check", "bench_run",
    "bench_compare", "gpu_status", "gpu_acquire", "gpu_renew", "gpu_release", "variant_add", "variant_next",
    "variant_update", "variant_list", "job_wait", "job_cancel", "report_write",
}  # fmt: skip
READ_ONLY = {"gpu_status", "variant_list", "job_wait"}
DESTRUCTIVE = {"gpu_release", "job_cancel"}


def list_tools(workspace: Path) -> list[dict[str, Any]]:
    with raw_server(workspace) as server:
        tools: list[dict[str, Any]] = server.request("tools/list", {})["tools"]
    return tools


def test_the_tools_are_those_of_the_interfaces(workspace: Path) -> None:
    tools = list_tools(workspace)
    names = [tool["name"] for tool in tools]
    assert len(names) == len(set(names)) <= MAX_TOOLS
    assert set(names) >= NAMES
    hints = {tool["name"]: tool["annotations"] for tool in tools}
    for name in NAMES:
        assert hints[name]["readOnlyHint"] is (name in READ_ONLY), name
        assert hints[name]["destructiveHint"] is (name in DESTRUCTIVE), name
        assert hints[name]["openWorldHint"] is False, name
    for tool in tools:
        assert len(tool["description"]) > 20, tool["name"]
        assert tool["inputSchema"]["type"] == "object"
    num_characters = len(json.dumps(tools))
    print(f"{len(tools)} tools, {num_characters} characters")
    assert num_characters < MAX_CHARACTERS


def test_the_schemas_are_the_golden_ones(workspace: Path) -> None:
    tools = sorted(list_tools(workspace), key=lambda tool: str(tool["name"]))
    text = json.dumps(tools, indent=1, sort_keys=True) + "\n"
    if os.environ.get(REFRESH):
        GOLDEN.write_text(text)
    golden = GOLDEN.read_text()
    if text != golden:
        diff = "\n".join(difflib.unified_diff(golden.splitlines(), text.splitlines(), "golden", "now", lineterm=""))
        pytest.fail(f"the tools' schemas changed:\n{diff}\nif that is meant, run this test once with {REFRESH}=1")


async def test_the_sdk_client_sees_the_same_with_instructions(workspace: Path) -> None:
    async with connected(workspace) as session:
        listed = await session.client.list_tools()
        assert {tool.name for tool in listed.tools} >= NAMES
        assert session.client.instructions is not None
        for name in ("ir_build", "variant_next", "job_wait"):
            assert name in session.client.instructions
        assert session.client.server_info.name == "flashrt"


async def test_listing_tools_makes_nothing_in_the_workspace(workspace: Path) -> None:
    before = sorted(workspace.iterdir())
    async with connected(workspace) as session:
        await session.client.list_tools()
    assert sorted(workspace.iterdir()) == before
