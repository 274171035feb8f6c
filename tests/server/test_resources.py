"""Prompts, resources and completions, through a real client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mcp.shared.exceptions import MCPError
from mcp_types import PromptReference, ResourceTemplateReference, TextContent

from flashrt.mcp_server.prompts import ARGUMENTS
from flashrt.mcp_server.skills import read_skills
from tests.server.connection import connected

pytestmark = pytest.mark.anyio
SKILLS = {skill.name: skill for skill in read_skills()}


async def test_each_skill_is_a_prompt_with_what_is_meant_filled_in(workspace: Path) -> None:
    async with connected(workspace) as session:
        prompts = {prompt.name: prompt for prompt in (await session.client.list_prompts()).prompts}
        assert prompts.keys() == SKILLS.keys() == ARGUMENTS.keys()
        for name, skill in SKILLS.items():
            assert prompts[name].description == skill.description
            given = {argument.name: f"the {argument.name}" for argument in prompts[name].arguments or []}
            messages = (await session.client.get_prompt(name, given)).messages
            assert len(messages) == 1
            assert isinstance(messages[0].content, TextContent)
            text = messages[0].content.text
            assert all(f"- {key}: the {key}" in text for key in given)
            assert skill.text in text
            assert skill.references
            assert all(reference.strip() in text for reference in skill.references.values())
        with pytest.raises(MCPError, match=r"design-variants.*'no-such'"):
            await session.client.get_prompt("no-such")
    assert not (workspace / ".flashrt").exists()


async def test_what_was_made_is_a_resource_by_its_id(workspace: Path) -> None:
    async with connected(workspace) as session:
        templates = (await session.client.list_resource_templates()).resource_templates
        assert {one.uri_template for one in templates} == {
            f"{kind}://{{id}}" for kind in ("program", "run", "variant", "job")
        }
        assert (await session.client.list_resources()).resources == []
        assert not (workspace / ".flashrt").exists(), "looking makes nothing"
        program = (await session.call("ir_build", document="program.yaml"))["program"]
        variant = (await session.call("variant_add", hypothesis="h", transformation="t", bottleneck="b", legality="l"))[
            "variant"
        ]
        job = (await session.outcome("ir_interpret", program=program, inputs="inputs.py:batches", count=1))["job"]
        names = {resource.name: resource.uri for resource in (await session.client.list_resources()).resources}
        assert names.keys() == {program, variant, job}
        for name, key in ((program, "graphs"), (variant, "hypothesis"), (job, "state")):
            contents = (await session.client.read_resource(names[name])).contents
            assert contents[0].mime_type == "application/json"
            assert key in json.loads(contents[0].text)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "uri",
    ["program://prog-000000000000", "run://run-00000000", "variant://var-9999", "job://job-00000000", "job://..",
     "program://%2Fetc%2Fpasswd", "file:///etc/passwd", "program://program.yaml"],
)  # fmt: skip
async def test_an_unknown_resource_is_refused_and_no_file_is_read(workspace: Path, uri: str) -> None:
    async with connected(workspace) as session:
        await session.call("ir_build", document="program.yaml")
        with pytest.raises(MCPError) as caught:
            await session.client.read_resource(uri)
        assert "root:" not in str(caught.value)
        assert "Traceback" not in str(caught.value)


async def test_ids_and_paths_complete(workspace: Path) -> None:
    async with connected(workspace) as session:
        program = (await session.call("ir_build", document="program.yaml"))["program"]

        async def complete(reference: PromptReference | ResourceTemplateReference, name: str, typed: str) -> list[str]:
            return (await session.client.complete(reference, {"name": name, "value": typed})).completion.values

        by_id = ResourceTemplateReference(uri="program://{id}")
        assert await complete(by_id, "id", "pro") == [program]
        assert await complete(by_id, "id", "var") == []
        write = PromptReference(name="write-program")
        assert await complete(write, "reference", "refer") == ["reference.py:serve"]
        found = await complete(PromptReference(name="design-variants"), "program", "pro")
        assert found[0] == program
        assert "program.yaml" in found
        assert all(not value.startswith((".", "/")) for value in await complete(write, "reference", ""))
        assert await complete(write, "no-such", "") == []
